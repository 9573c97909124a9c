"""The page of `tailrace view`: what it reads from the files of runs, and how it is served."""
