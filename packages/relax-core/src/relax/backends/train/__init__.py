"""Training backends: what turns micro-batches and a loss into new weights, behind the protocol in `base`."""
