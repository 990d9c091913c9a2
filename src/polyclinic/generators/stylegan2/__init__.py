"""StyleGAN2 with adaptive discriminator augmentation (ADA)."""
