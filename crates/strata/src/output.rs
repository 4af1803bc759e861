//! What the program leaves behind: files that are whole or absent, and standard output whose reader may go away.
//!
//! Invariant: the path that a [`WholeFile`] was made for changes only in [`WholeFile::finish`], and then to the whole
//! content. Until then the content is in a file of another name beside it, which goes when the value is dropped, and also
//! when the fault guard ends the program. Links are followed: it is the file that they lead to that is replaced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use strata_gguf::sigbus::RemoveOnFault;

use crate::failure::Failure;

/// A file being written.
pub struct WholeFile {
    path: PathBuf,
    /// The name that the content has until it is complete; none for a pipe or device, which is written directly.
    part: Option<Part>,
    writer: BufWriter<File>,
}

/// A file that is removed unless it was given its own name.
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

fn cannot(path: &Path, action: &str, error: &io::Error) -> Failure {
    Failure::failed(format!("{}: cannot {action}: {error}", path.display()))
}

impl WholeFile {
    /// Begins a file. Nothing is at `path` yet that was not there before.
    pub fn create(path: &Path) -> Result<WholeFile, Failure> {
        let there = fs::metadata(path).ok();
        if there.as_ref().is_some_and(fs::Metadata::is_dir) {
            return Err(Failure::failed(format!("{}: is a folder; give the name of a file", path.display())));
        }
        let open = |target: &Path, new: bool| {
            let file = OpenOptions::new().write(true).create_new(new).open(target);
            file.map_err(|error| cannot(path, "write it", &error))
        };
        if there.is_some_and(|there| !there.is_file()) {
            let writer = BufWriter::new(open(path, false)?);
            return Ok(WholeFile { path: path.to_owned(), part: None, writer });
        }
        let is_link = fs::symlink_metadata(path).is_ok_and(|there| there.is_symlink());
        let target = if is_link { fs::canonicalize(path) } else { Ok(path.to_owned()) };
        let target = target.map_err(|error| cannot(path, "follow the link", &error))?;
        let end = path.as_os_str().as_encoded_bytes();
        // `file_name` overlooks what may follow: a slash, or `/.`.
        let name = target.file_name().filter(|name| is_link || end.ends_with(name.as_encoded_bytes()));
        let Some(name) = name else {
            return Err(Failure::failed(format!("{}: is not the name of a file", path.display())));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", std::process::id()));
        let beside = target.with_file_name(hidden);
        let guard = RemoveOnFault::new(&beside).map_err(|error| cannot(path, "write it", &error))?;
        let writer = BufWriter::with_capacity(1 << 20, open(&beside, true)?);
        let part = Part { path: beside, named: false, _guard: guard };
        Ok(WholeFile { path: target, part: Some(part), writer })
    }

    /// Whether a file could be begun at `path`, so that this is known before the work for it.
    pub fn check(path: &Path) -> Result<(), Failure> {
        WholeFile::create(path).map(drop)
    }

    /// Adds bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.writer.write_all(bytes).map_err(|error| cannot(&self.path, "write it", &error))
    }

    /// Gives the content its name.
    pub fn finish(mut self) -> Result<(), Failure> {
        let flushed = self.writer.flush();
        flushed.map_err(|error| cannot(&self.path, "write it", &error))?;
        let Some(part) = &mut self.part else { return Ok(()) };
        // Some file systems tell only now that there is no room.
        self.writer.get_ref().sync_all().map_err(|error| cannot(&self.path, "write it", &error))?;
        fs::rename(&part.path, &self.path).map_err(|error| cannot(&self.path, "name it", &error))?;
        part.named = true;
        Ok(())
    }
}

/// Prints to standard output at once.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::PipeClosed,
        _ => Failure::failed(format!("cannot write to standard output: {error}")),
    })
}

/// Prints a value as indented JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}

/// The header of a `.npy` file (version 1.0) of little-endian f32 in row-major order.
/// Format: NEP 1, "A Simple File Format for NumPy Arrays".
pub fn npy_header(rows: usize, columns: usize) -> Vec<u8> {
    const PREAMBLE: usize = 10;
    let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    // Padded so that the data begins at a multiple of 64.
    let padded = (PREAMBLE + text.len() + 1).next_multiple_of(64);
    text.extend(std::iter::repeat_n(' ', padded - PREAMBLE - text.len() - 1));
    text.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((text.len() as u16).to_le_bytes());
    header.extend(text.as_bytes());
    header
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
        let mut file = WholeFile::create(&path).unwrap();
        file.write(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["out.npy"]);

        let mut file = WholeFile::create(&path).unwrap();
        file.write(b"new").unwrap();
        file.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["out.npy"]);
    }

    /// Oracle: the message names the path; nothing is created.
    #[test]
    fn what_cannot_be_written_is_said_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("no/such/out.npy");
        assert!(WholeFile::check(&missing).unwrap_err().to_string().contains("no/such/out.npy"));
        assert!(WholeFile::check(folder.path()).unwrap_err().to_string().contains("folder"));
        assert!(names(folder.path()).is_empty());
        let dangling = folder.path().join("dangling");
        std::os::unix::fs::symlink("absent", &dangling).unwrap();
        let path = |end: &str| folder.path().join(end);
        for path in [dangling, path("out.npy/"), path("out.npy/."), path("out.npy/.."), path("dangling/")] {
            let error = WholeFile::check(&path).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
        }
        assert_eq!(names(folder.path()), ["dangling"]);
    }

    /// Oracle: what a shell's `>` does: the link stays, the file behind it gets the content.
    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("deep/real.npy"), folder.path().join("link.npy"));
        fs::create_dir(folder.path().join("deep")).unwrap();
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink("deep/real.npy", &link).unwrap();
        let mut file = WholeFile::create(&link).unwrap();
        file.write(b"new").unwrap();
        file.finish().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(names(&folder.path().join("deep")), ["real.npy"]);
    }

    /// Oracle: a device is no file to be replaced, and a full one is an error.
    #[test]
    fn a_device_is_written_directly() {
        let mut file = WholeFile::create(Path::new("/dev/full")).unwrap();
        file.write(b"x").unwrap();
        assert!(file.finish().unwrap_err().to_string().contains("/dev/full"));
    }

    /// Oracle: another reader of the format.
    #[test]
    fn npy_headers_are_readable() {
        for (rows, columns) in [(0, 5), (1, 1), (3, 12_288), (123_456, 248_320)] {
            let header = npy_header(rows, columns);
            assert_eq!(header.len() % 64, 0);
            let npy = npyz::NpyFile::new(&header[..]).unwrap();
            assert_eq!(npy.shape(), [rows as u64, columns as u64]);
            assert_eq!(npy.order(), npyz::Order::C);
        }
    }
}
