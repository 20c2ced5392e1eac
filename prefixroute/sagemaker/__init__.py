"""The AWS endpoint contract over the same proxy: paths, headers, signatures, errors and event streams of SageMaker."""
