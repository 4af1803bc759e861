//! The printable alphabet in which byte-level BPE vocabularies write bytes.
//!
//! Each of the 256 bytes has one character: printable Latin-1 bytes stand for themselves, the other 68 take the
//! characters from U+0100 on, in ascending byte order. So a space is `Ġ` and a newline is `Ċ`.

/// The character of every byte.
const CHARS: [char; 256] = chars();

/// One past the last character of the alphabet.
const END: usize = 0x100 + 68;

/// The byte of every character below [`END`], or `u16::MAX` for a character outside the alphabet.
const BYTES: [u16; END] = bytes();

const fn stands_for_itself(byte: usize) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

const fn chars() -> [char; 256] {
    let mut table = ['\0'; 256];
    let (mut byte, mut next) = (0, 0x100);
    while byte < 256 {
        let code = if stands_for_itself(byte) {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        table[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => panic!("the alphabet lies below the surrogates"),
        };
        byte += 1;
    }
    table
}

const fn bytes() -> [u16; END] {
    let mut table = [u16::MAX; END];
    let mut byte = 0;
    while byte < 256 {
        table[CHARS[byte] as usize] = byte as u16;
        byte += 1;
    }
    table
}

/// The character that stands for `byte`.
pub(super) fn char_of(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// The byte that `c` stands for, if it belongs to the alphabet.
pub(super) fn byte_of(c: char) -> Option<u8> {
    BYTES.get(c as usize).and_then(|&b| u8::try_from(b).ok())
}

/// Writes `text`'s UTF-8 bytes into `out` in the alphabet.
pub(super) fn spell(text: &[u8], out: &mut String) {
    out.extend(text.iter().map(|&b| char_of(b)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the definition; a bijection with the well-known images of space, newline, tab and the soft hyphen.
    #[test]
    fn is_a_bijection() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!([b' ', b'\n', b'\t', 0xAD, b'a', 0xE9].map(char_of), ['Ġ', 'Ċ', 'ĉ', 'Ń', 'a', 'é']);
        assert_eq!(byte_of(' '), None);
        assert_eq!(byte_of('\u{144}'), None);
        assert_eq!(byte_of('漢'), None);
    }
}
