"""From manifests to a corpus directory."""
