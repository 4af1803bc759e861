//! GGUF files put together byte by byte, so that a test can make any of them wrong. Written from the format's
//! description, independently of the crate's own writer.

/// A file in pieces.
#[derive(Clone)]
pub struct Raw {
    pub magic: [u8; 4],
    pub version: u32,
    /// What the header claims; by default what there is.
    pub pair_count: Option<u64>,
    pub tensor_count: Option<u64>,
    pub pairs: Vec<Vec<u8>>,
    pub entries: Vec<Vec<u8>>,
    pub alignment: usize,
    pub data: usize,
}

pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// A key-value pair: the value type's id and the value's bytes.
pub fn pair(key: impl AsRef<[u8]>, ty: u32, value: &[u8]) -> Vec<u8> {
    [&string(key)[..], &ty.to_le_bytes(), value].concat()
}

/// An array value: element type, claimed count, bytes of the elements.
pub fn array(ty: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

/// An entry of the tensor index.
pub fn entry(name: impl AsRef<[u8]>, shape: &[u64], ty: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name);
    out.extend((shape.len() as u32).to_le_bytes());
    shape.iter().for_each(|len| out.extend(len.to_le_bytes()));
    out.extend(ty.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

impl Raw {
    /// A valid file: `general.architecture` and an F32 vector of 8.
    pub fn valid() -> Self {
        Raw {
            magic: *b"GGUF",
            version: 3,
            pair_count: None,
            tensor_count: None,
            pairs: vec![pair("general.architecture", 8, &string("test"))],
            entries: vec![entry("a", &[8], 0, 0)],
            alignment: 32,
            data: 32,
        }
    }

    pub fn pair(mut self, pair: Vec<u8>) -> Self {
        self.pairs.push(pair);
        self
    }

    pub fn entry(mut self, entry: Vec<u8>, data: usize) -> Self {
        self.entries.push(entry);
        self.data += data;
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        out.extend(self.pair_count.unwrap_or(self.pairs.len() as u64).to_le_bytes());
        out.extend(self.pairs.concat());
        out.extend(self.entries.concat());
        if self.data > 0 {
            out.resize(out.len().next_multiple_of(self.alignment) + self.data, 0);
        }
        out
    }
}
