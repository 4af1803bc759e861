//! Numbers that are the same on every machine.

/// A small generator: the same bytes everywhere.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator of its own for each seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Whole blocks of a format, any bytes: also scales that aren't finite.
    pub fn blocks(&mut self, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|_| (self.next() >> 8) as u8).collect()
    }

    /// Blocks of weights and sub-scales at their ends: runs of the same bytes.
    pub fn extremes(&mut self, bytes: usize) -> Vec<u8> {
        let mut all = Vec::with_capacity(bytes);
        while all.len() < bytes {
            let run = self.next() as usize % 120 + 1;
            let byte = [0x00, 0x3b, 0x7f, 0x80, 0xff][self.next() as usize % 5];
            all.resize((all.len() + run).min(bytes), byte);
        }
        all
    }

    /// Columns of activations at their ends.
    pub fn ends(&mut self, k: usize, cols: usize) -> Vec<f32> {
        (0..k * cols)
            .map(|i| match i / k % 4 {
                0 => 1.0,
                1 => -1.0,
                _ => [1.0, -1.0, 1.0, 0.3][self.next() as usize % 4],
            })
            .collect()
    }

    /// Activations: blocks of very different sizes, one of zeros, one too small.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| {
                let x = (self.next() as f32 / (1u64 << 30) as f32 - 1.0) * 3.0;
                x * [1.0, 1e-3, 1e4, 0.0, 1e-32][i / 32 % 5]
            })
            .collect()
    }
}

/// Token ids below `vocab`.
pub fn ids(vocab: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7919 + i * i * 31) % vocab) as u32).collect()
}
