"""Later axes: packages that import the core, and that the core never names."""
