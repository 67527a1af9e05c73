"""The native core, an optional part: without a C++ compiler the package is pure Python."""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/kvpool/_native")

setup(
    ext_modules=[
        Extension(
            "kvpool._native._core",
            sorted(map(str, FOLDER.glob("*.cpp"))),
            depends=sorted(map(str, FOLDER.glob("*.hpp"))),
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-g0"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
