"""Objects in a directory and in a store without folders, which others may have filled with anything."""

import os
from errno import EINVAL
from types import SimpleNamespace

import pytest

from cache_service.errors import ObjectStoreError, SettingError
from cache_service.regions.object_store import FsspecObjects


@pytest.fixture(params=["file", "memory"])
def objects(request, tmp_path):
    url = (tmp_path / "between").as_uri() if request.param == "file" else f"memory://{tmp_path.name}"
    return FsspecObjects(url, "model")


def test_objects_are_written_listed_read_and_deleted(objects):
    assert (objects.clusters(), objects.sizes("asia"), objects.read("asia", "one", 9)) == ([], {}, None)
    objects.write("asia", "one", b"before")
    objects.write("asia", "one", b"12345")
    objects.write("asia", "empty", b"")
    assert objects.clusters() == ["asia"]
    assert objects.sizes("asia") == {"one": 5, "empty": 0}
    assert (objects.read("asia", "one", 3), objects.read("asia", "empty", 3)) == (b"1234", b"")
    objects.delete("asia", "one")
    objects.delete("asia", "one")
    assert objects.sizes("asia") == {"empty": 0}


@pytest.mark.parametrize(("size", "read"), [(0, b""), (5, None)])
def test_a_store_that_has_no_range_of_an_empty_object_has_an_empty_object(size, read):
    def refuse(path, **options):
        raise OSError(EINVAL, "The requested range is not satisfiable")  # as s3fs does

    objects = FsspecObjects("memory://place", "model")
    objects._files = SimpleNamespace(protocol="memory", cat_file=refuse, size=lambda path: size)
    if read is None:
        with pytest.raises(ObjectStoreError, match="range"):
            objects.read("asia", "one", 9)
    else:
        assert objects.read("asia", "one", 9) == read


def test_nothing_is_read_from_pipes_and_folders_or_written_through_links(tmp_path):
    objects = FsspecObjects(tmp_path.as_uri(), "model")
    folder, outside = tmp_path / "model" / "asia", tmp_path / "outside"
    (folder / "folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    outside.write_bytes(b"untouched")
    for name in ("link", "link.part"):
        (folder / name).symlink_to(outside)
    assert objects.read("asia", "pipe", 9) is objects.read("asia", "folder", 9) is None
    objects.write("asia", "link", b"new")
    assert (outside.read_bytes(), objects.read("asia", "link", 9)) == (b"untouched", b"new")
    assert objects.clusters() == ["asia"]
    with pytest.raises(ObjectStoreError, match="folder"):
        objects.delete("asia", "folder")


def test_credentials_are_in_no_error():
    def refuse(path, **options):
        raise PermissionError(
            f"{path} https://me:{secret}@host/a?X-Amz-Signature=abc {nested}\nsecond line " + "x" * 999
        )

    secret, nested = "s3cr3t", "t0k3n"
    options = {"secret": secret, "client_kwargs": {"tokens": [nested]}}
    objects = FsspecObjects("memory://place", "model", lambda: options)
    objects._files = SimpleNamespace(protocol="memory", cat_file=refuse)
    with pytest.raises(ObjectStoreError, match="PermissionError") as told:
        objects.read("asia", "one", 9)
    for hidden in (secret, nested, "abc", "\n", "x" * 300):
        assert hidden not in str(told.value)
    assert told.value.__cause__ is None


@pytest.mark.parametrize("options", [{"secret": "s3cr3t"}, {"use_listings_cache": True}])
def test_a_file_system_that_cannot_be_opened_is_told_without_its_options(options):
    with pytest.raises(SettingError, match="fsspec cannot open it") as told:
        FsspecObjects("nosuchsystem://place" if "secret" in options else "memory://place", "model", lambda: options)
    assert "s3cr3t" not in str(told.value)


def test_credentials_that_were_replaced_are_used_from_the_next_listing_on():
    options = {"secret": "before"}
    objects = FsspecObjects("memory://place", "model", lambda: options)
    before = objects._files
    objects.clusters()
    assert objects._files is before
    options = {"secret": "after"}
    objects.clusters()
    assert objects._files.storage_options["secret"] == "after"
