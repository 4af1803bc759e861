//! Philox4x32-10, a counter-based random function: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011. Ten rounds of two 32 x 32 bit products; the same on every device.

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The draw of a position: uniform in `[0, 1)`, 53 bits.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let words = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the known answers that the paper's authors publish with their library.
    #[test]
    fn known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(counter, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    /// Oracle: the mean and the ends of a uniform distribution.
    #[test]
    fn draws_are_uniform() {
        let n = 20_000;
        let draws: Vec<f64> = (0..n).map(|p| uniform(7, p)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        assert_ne!(uniform(7, 1), uniform(8, 1));
    }
}
