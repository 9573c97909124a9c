"""For whoever asks where the time went: the page of `tailrace view`."""
