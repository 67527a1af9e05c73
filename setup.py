"""The native core, an optional part: without a C++ compiler the package is pure Python."""

from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/kvpool/_native")
DIGEST = run_path(str(FOLDER / "sources.py"))["digest"](FOLDER)


class BuildAnew(build_ext):
    """What an earlier build has left is no part of this one, also when this one fails."""

    def run(self) -> None:
        left = [Path(self.build_lib, self.get_ext_filename(extension.name)) for extension in self.extensions]
        if self.inplace:
            left += [FOLDER / path.name for path in left]
        for path in left:
            path.unlink(missing_ok=True)
        super().run()


setup(
    cmdclass={"build_ext": BuildAnew},
    ext_modules=[
        Extension(
            "kvpool._native._core",
            sorted(map(str, FOLDER.glob("*.cpp"))),
            depends=sorted(map(str, FOLDER.glob("*.hpp"))),
            language="c++",
            define_macros=[("KVPOOL_SOURCES", f'"{DIGEST}"')],
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-g0"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
