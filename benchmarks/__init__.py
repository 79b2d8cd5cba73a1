"""What a private step costs: time and memory, beside plain PyTorch and Opacus."""
