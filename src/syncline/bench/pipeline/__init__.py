"""`bench pipeline`: fine-tuning with freezing, pipelines that shrink, and a cache of activations, against DDP."""
