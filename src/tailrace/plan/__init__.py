"""Which schedule, division of the devices, widths and tensor-parallel size for a cluster."""
