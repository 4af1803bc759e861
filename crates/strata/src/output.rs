//! What the program writes: standard output, whose reader may go away, and the header of arrays.

use std::io::{self, Write};
use std::path::Path;

use crate::failure::Failure;

/// Prints to standard output at once.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::PipeClosed,
        _ => Failure::failed(format!("cannot write to standard output: {error}")),
    })
}

/// A path on its way to a terminal, which nothing in it steers.
pub fn printable(path: &Path) -> String {
    path.display().to_string().replace(|c: char| c.is_control(), "?")
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
