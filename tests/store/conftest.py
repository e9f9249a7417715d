from store.synthetic import synthetic

__all__ = ["synthetic"]
