"""What pyproject.toml cannot say: data/ and notebooks/ are installed inside the package."""

from setuptools import find_packages, setup

INSIDE = {"shadowkv_lab.data": "data", "shadowkv_lab.notebooks": "notebooks"}

setup(
    packages=[*find_packages(include=["shadowkv_lab*"]), *INSIDE],
    package_dir=INSIDE,
    package_data={
        "shadowkv_lab.data": ["**/*"],
        "shadowkv_lab.kernels": ["*.cu"],
        "shadowkv_lab.notebooks": ["*.ipynb"],
    },
)
