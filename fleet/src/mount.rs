//! File systems that a board must not lie on.

use std::path::Path;

/// Names of network file systems in `/proc/self/mountinfo`. SQLite's locks and shared memory do not hold on them.
const NETWORK: [&str; 18] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.ceph-fuse",
    "fuse.s3fs",
    "fuse.rclone",
    "fuse.juicefs",
];

/// The network file system that a path lies on, if it does, by a text in the form of `/proc/self/mountinfo`. The path
/// must be absolute and without links.
#[must_use]
pub fn network_mount(mounts: &str, path: &Path) -> Option<String> {
    let entries = mounts.lines().filter_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let point = place.split(' ').nth(4)?.replace("\\040", " ");
        let kind = kind.split(' ').next()?;
        path.starts_with(&point).then(|| (Path::new(&point).components().count(), kind.to_owned()))
    });
    // Of two mounts on one point the later one covers the earlier.
    let (_, kind) = entries.max_by_key(|(depth, _)| *depth)?;
    NETWORK.contains(&kind.as_str()).then_some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_file_system_is_found_by_its_deepest_mount() {
        let mounts = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            30 22 0:44 / /home rw shared:2 - nfs4 server:/home rw\n\
            31 30 8:2 / /home/local rw - xfs /dev/sdb rw\n\
            32 22 0:50 / /mnt/a\\040b rw - fuse.sshfs me@host:/ rw\n";
        let kind = |path: &str| network_mount(mounts, Path::new(path));
        assert_eq!(kind("/tmp/board.sqlite"), None);
        assert_eq!(kind("/home/me/board.sqlite").as_deref(), Some("nfs4"));
        assert_eq!(kind("/home/local/board.sqlite"), None);
        assert_eq!(kind("/homes/board.sqlite"), None);
        assert_eq!(kind("/mnt/a b/board.sqlite").as_deref(), Some("fuse.sshfs"));
        assert_eq!(network_mount("not a mount table", Path::new("/a")), None);
    }
}
