"""The laboratory of rewards: judges against labels, and other rewards on saved chains."""
