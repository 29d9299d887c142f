"""What a deployment on Kubernetes needs beside the chart: checks of manifests, estimates of sizes, the end of a pod.

May import: every layer below it in cluster, and actors.
"""
