"""GANs: settings, networks, losses, the trainer, and a central discriminator."""
