"""Records of verification runs on GPUs, and the command that writes and checks them."""
