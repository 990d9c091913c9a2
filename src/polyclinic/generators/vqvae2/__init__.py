"""VQ-VAE-2: autoencoder, codebooks and the PixelCNN prior."""
