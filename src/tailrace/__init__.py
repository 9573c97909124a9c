"""tailrace: post-train language models on verifiable rewards, without waiting for the longest response."""

__version__ = "0.1.0"
