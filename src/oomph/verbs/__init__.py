"""What oomph does, one module per verb. Heavy imports happen inside the functions."""
