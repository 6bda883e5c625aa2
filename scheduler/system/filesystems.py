"""Kinds of file systems by statfs(2) number: some are shared between machines, in memory, or without file modes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A kind of file system and its properties."""

    name: str
    shared: bool = False  # other machines may write it: inotify misses that, and locks depend on the server
    memory: bool = False  # its files are lost at a reboot
    modes: bool = True  # stores owners and modes of files
    known: bool = True  # its number is in the tables below


_SHARED = {
    0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "SMB", 0xFE534D42: "SMB", 0x65735546: "FUSE", 0x0BD00BD0: "Lustre",
    0x19830326: "BeeGFS", 0x47504653: "GPFS", 0x00C36400: "Ceph", 0x01021997: "9P", 0x5346414F: "AFS", 0x6B414653: "AFS",
    0x73757245: "Coda", 0x01161970: "GFS2", 0x7461636F: "OCFS2", 0x20030528: "OrangeFS", 0xAAD7AAEA: "PanFS",
    0x786F4256: "vboxsf", 0xBACBACBC: "vmhgfs",
}  # fmt: skip
_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
_NO_MODES = {0x4D44: "FAT", 0x2011BAB0: "exFAT"}
_LOCAL = {
    0xEF53: "ext4", 0x58465342: "XFS", 0x9123683E: "Btrfs", 0x2FC12FC1: "ZFS", 0xF2F52010: "F2FS", 0xCA451A4E: "bcachefs",
    0x794C7630: "overlay", 0x3153464A: "JFS", 0x52654973: "ReiserFS", 0x3434: "NILFS", 0x7366746E: "NTFS", 0xF15F: "eCryptfs",
    0x73717368: "squashfs", 0xE0F5E1E2: "EROFS", 0x9660: "ISO 9660",
}  # fmt: skip


def file_system(number: int) -> FileSystem:
    """Return the kind of file system with this statfs number. An unknown kind counts as local, with ``known`` False."""
    number &= 0xFFFFFFFF
    if number in _SHARED:
        return FileSystem(_SHARED[number], shared=True)
    if number in _MEMORY:
        return FileSystem(_MEMORY[number], memory=True)
    if number in _NO_MODES:
        return FileSystem(_NO_MODES[number], modes=False)
    if number in _LOCAL:
        return FileSystem(_LOCAL[number])
    return FileSystem(f"type 0x{number:x}", known=False)
