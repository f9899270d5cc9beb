"""The network: features, targets, masks, encoder and loss, as plain PyTorch modules."""
