"""Optional products, a folder each. The heart and the drivers name them, and import them only when a config
or a command names them."""
