"""The checks of object stores: speed, and what a run takes from them."""
