"""For the owner of a cluster: `tailrace plan` and `tailrace fit`."""
