"""A page that simulates schedules in a browser while its reader changes the set-up."""
