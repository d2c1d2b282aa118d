"""Workload of a plain Lightning module with its own loaders or a ``LightningDataModule``."""
