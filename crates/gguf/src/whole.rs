//! Files that are whole or absent.
//!
//! Invariant: the path that a [`WholeFile`] was made for changes only in [`WholeFile::finish`], and then to the whole
//! content. Until then the content is in a file called `.NAME.PID-N.part` beside it, which goes when the value is
//! dropped, and also when the fault guard ends the program. Links are followed: it is the file that they lead to that
//! is replaced. Who may read and write a file stays as it was.

use crate::error::{Error, WriteProblem, printable_path};
use crate::sigbus::RemoveOnFault;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{self, File, FileType, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file being written.
#[derive(Debug)]
pub struct WholeFile {
    file: File,
    path: PathBuf,
    replace: bool,
    /// The name that the content has until it is complete; none for a device, which is written directly.
    part: Option<Part>,
}

/// A file that is removed unless it was given its own name.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    named: bool,
    /// For an end without drops.
    _guard: RemoveOnFault,
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.named {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes the names of parts unique within the process.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl WholeFile {
    /// Begins a file. Nothing is at `path` yet that was not there before. A character device (`/dev/null`) is written
    /// directly.
    ///
    /// # Errors
    /// [`Error::Exists`] for a file that may not be replaced, [`Error::Write`] for what is no file, else what the
    /// operating system says.
    pub fn create(path: &Path, replace: bool) -> Result<WholeFile, Error> {
        let wrong = |problem| Error::Write { file: printable_path(path), problem };
        let failed = |action| move |source| Error::Io { file: printable_path(path), action, source };
        let there = fs::metadata(path).ok();
        let kind = there.as_ref().map(fs::Metadata::file_type);
        let mode = there.map(|there| there.mode() & 0o777);
        if kind.is_some_and(|kind| kind.is_char_device()) {
            let file = OpenOptions::new().write(true).open(path).map_err(failed("open it"))?;
            return Ok(WholeFile { file, path: path.to_owned(), replace, part: None });
        }
        if let Some(kind) = kind.filter(|kind| !kind.is_file()) {
            return Err(wrong(WriteProblem::NotAFile(name_of(kind))));
        }
        let is_link = fs::symlink_metadata(path).is_ok_and(|there| there.is_symlink());
        check_free(path, replace)?;
        let target = if is_link { fs::canonicalize(path) } else { Ok(path.to_owned()) };
        let target = target.map_err(failed("follow the link"))?;
        let end = path.as_os_str().as_encoded_bytes();
        // `file_name` overlooks what may follow: a slash, or `/.`.
        let name = target.file_name().filter(|name| is_link || end.ends_with(name.as_encoded_bytes()));
        let name = name.ok_or_else(|| wrong(WriteProblem::NoFileName))?;
        loop {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".{}-{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
            let beside = target.with_file_name(hidden);
            let guard = RemoveOnFault::new(&beside).map_err(failed("create it"))?;
            match OpenOptions::new().write(true).create_new(true).mode(mode.unwrap_or(0o666)).open(&beside) {
                Ok(file) => {
                    let part = Part { path: beside, named: false, _guard: guard };
                    // Those bits that the mask took.
                    if let Some(mode) = mode {
                        let set = file.set_permissions(Permissions::from_mode(mode));
                        set.map_err(failed("set its permissions"))?;
                    }
                    return Ok(WholeFile { file, path: target, replace, part: Some(part) });
                }
                // What a program that was killed has left.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed("create it")(error)),
            }
        }
    }

    /// The path that the file will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path as errors name it.
    pub(crate) fn name(&self) -> String {
        printable_path(&self.path)
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> Error + use<> {
        let file = self.name();
        move |source| Error::Io { file, action, source }
    }

    /// Gives the file its length, and its blocks where the file system can.
    pub(crate) fn reserve(&self, len: u64) -> Result<(), Error> {
        if self.part.is_none() {
            return Ok(());
        }
        let reserved = loop {
            match fallocate(&self.file, FallocateFlags::empty(), 0, len) {
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => break self.file.set_len(len),
                done => break done.map_err(io::Error::from),
            }
        };
        reserved.map_err(self.failed("reserve the space for it"))
    }

    /// Adds bytes behind those added before. It doesn't buffer.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.file.write_all(bytes);
        written.map_err(self.failed("write it"))
    }

    /// Writes bytes to their place, from any thread.
    pub(crate) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all_at(bytes, offset).map_err(self.failed("write it"))
    }

    /// Waits until everything is on the disk: some file systems tell only then that there is no room.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        if self.part.is_none() {
            return Ok(());
        }
        self.file.sync_all().map_err(self.failed("write it"))
    }

    /// Gives the content its name.
    pub(crate) fn publish(&mut self) -> Result<(), Error> {
        let failed = self.failed("give it its name");
        let Some(part) = &mut self.part else { return Ok(()) };
        check_free(&self.path, self.replace)?;
        fs::rename(&part.path, &self.path).map_err(failed)?;
        part.named = true;
        Ok(())
    }

    /// Waits until everything is on the disk, and gives it its name.
    ///
    /// # Errors
    /// [`Error::Exists`] if a file appeared meanwhile that may not be replaced, else what the operating system says.
    /// Nothing is left behind.
    pub fn finish(mut self) -> Result<(), Error> {
        self.sync()?;
        self.publish()
    }
}

/// Refuses to replace a file without leave.
fn check_free(path: &Path, replace: bool) -> Result<(), Error> {
    if !replace && fs::symlink_metadata(path).is_ok() {
        return Err(Error::Exists { file: printable_path(path) });
    }
    Ok(())
}

fn name_of(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device of blocks"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Oracle: the invariant, looked at from outside.
    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.npy");
        fs::write(&path, "old").unwrap();
        let mut file = WholeFile::create(&path, true).unwrap();
        file.write(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()).len(), 2);
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["out.npy"]);

        let mut file = WholeFile::create(&path, true).unwrap();
        file.write(b"n").unwrap();
        file.write(b"ew").unwrap();
        file.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["out.npy"]);
    }

    /// Oracle: the message names the path and what is there; nothing is created. A pipe has no reader here, so opening it
    /// would never return.
    #[test]
    fn what_cannot_be_written_is_said_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = |end: &str| folder.path().join(end);
        std::os::unix::fs::symlink("absent", path("dangling")).unwrap();
        let pipe = path("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for (end, part) in [
            ("no/such/out.npy", "No such file"),
            ("", "is a folder"),
            ("pipe", "is a pipe"),
            ("socket", "is a socket"),
            ("dangling", "follow the link"),
            ("out.npy/", "no file name"),
            ("out.npy/.", "no file name"),
            ("out.npy/..", "no file name"),
            ("dangling/", "dangling/"),
        ] {
            let error = WholeFile::create(&path(end), true).unwrap_err().to_string();
            let start = format!("{}: ", path(end).display());
            assert!(error.starts_with(&start) && error.contains(part), "{error}");
        }
        assert_eq!(names(folder.path()), ["dangling", "pipe", "socket"]);
    }

    /// Oracle: what a shell's `>` does: the link stays, the file behind it gets the content.
    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("deep/real.npy"), folder.path().join("link.npy"));
        fs::create_dir(folder.path().join("deep")).unwrap();
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink("deep/real.npy", &link).unwrap();
        assert!(matches!(WholeFile::create(&link, false), Err(Error::Exists { .. })));
        let mut file = WholeFile::create(&link, true).unwrap();
        file.write(b"new").unwrap();
        file.finish().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(names(&folder.path().join("deep")), ["real.npy"]);
    }

    /// Oracle: `chmod`'s modes, before and after, also beside the mask. A new file's is left to the mask.
    #[test]
    fn a_file_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.npy");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        fs::write(&path, "old").unwrap();
        let usual = mode(&path);
        for wanted in [0o600, 0o666] {
            fs::set_permissions(&path, Permissions::from_mode(wanted)).unwrap();
            let file = WholeFile::create(&path, true).unwrap();
            assert_eq!(mode(&file.part.as_ref().unwrap().path), wanted);
            file.finish().unwrap();
            assert_eq!(mode(&path), wanted);
        }
        let new = folder.path().join("new.npy");
        WholeFile::create(&new, false).unwrap().finish().unwrap();
        assert_eq!(mode(&new), usual);
    }

    /// Oracle: a device is no file to be replaced, and a full one is an error.
    #[test]
    fn a_device_is_written_directly() {
        let mut file = WholeFile::create("/dev/full".as_ref(), false).unwrap();
        assert!(file.write(b"x").unwrap_err().to_string().contains("/dev/full"));
        let mut file = WholeFile::create("/dev/null".as_ref(), false).unwrap();
        file.write(b"x").unwrap();
        file.finish().unwrap();
    }
}
