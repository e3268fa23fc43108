"""What is measured on a trained model: each evaluation gives JSON and a picture."""
