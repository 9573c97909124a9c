"""For runs on several hosts: workers placed by Ray, or that join by themselves."""
