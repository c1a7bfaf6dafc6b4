"""What is shown: plots and the demonstration."""
