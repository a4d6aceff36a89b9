"""What oomph costs, beside its peers and a floor in the same run."""
