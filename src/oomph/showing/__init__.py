"""Records -> terminal, HTML pages, Prometheus. Views decide nothing."""
