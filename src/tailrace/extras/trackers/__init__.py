"""For whoever keeps experiments in a tracker: trackio, W&B, TensorBoard, MLflow and SwanLab."""
