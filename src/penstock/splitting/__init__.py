"""From a model to stages: by layers, by marks, by tracing."""
