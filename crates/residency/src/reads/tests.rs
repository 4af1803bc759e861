//! Every test goes through all ways of reading: io_uring and threads, past the page cache and through it, as far as the system has them.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;

use proptest::prelude::*;
use strata_plan::{Arena, Category, Plan};
use tempfile::TempDir;

use super::*;

/// Jobs under way in tests.
const JOBS: usize = 5;

fn byte(file: usize, place: u64) -> u8 {
    (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 ^ (file as u8).wrapping_mul(91)
}

/// Files with known bytes.
struct Files(TempDir, Vec<u64>);

impl Files {
    fn new(lengths: &[u64]) -> Files {
        let folder = tempfile::tempdir().unwrap();
        for (file, &length) in lengths.iter().enumerate() {
            let bytes: Vec<u8> = (0..length).map(|place| byte(file, place)).collect();
            fs::write(folder.path().join(file.to_string()), bytes).unwrap();
        }
        Files(folder, lengths.to_vec())
    }

    fn path(&self, file: usize) -> std::path::PathBuf {
        self.0.path().join(file.to_string())
    }

    fn reader(&self, way: Way, direct: bool) -> Reader {
        let open = |file| {
            let path = self.path(file);
            ReadFile { name: name(&path), file: File::open(&path).unwrap(), direct: open_direct(&path) }
        };
        let files = (0..self.1.len()).map(open).collect();
        let spawn = &mut |_, work: Box<dyn FnOnce() + Send>| thread::Builder::new().spawn(work);
        Reader::new(files, ReaderOptions { way, direct, jobs: JOBS, threads: 3, spawn }).unwrap()
    }

    fn readers(&self) -> [Reader; 4] {
        [(Way::Auto, true), (Way::Positioned, true), (Way::Auto, false), (Way::Positioned, false)]
            .map(|(way, direct)| self.reader(way, direct))
    }
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

fn open_direct(path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    #[cfg(not(target_os = "linux"))]
    let flags = 0;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

fn blocks(count: usize, bytes: usize) -> Vec<Block<u8>> {
    let mut plan = Plan::new();
    let region = plan.heap(Category::Experts, "test", count * bytes);
    let mut arena = Arena::new(&plan).unwrap();
    region.parts(bytes).map(|part| arena.take(part).unwrap()).collect()
}

/// Pieces with room for each, one behind the other.
fn placed(pieces: &[(u16, u64, usize)]) -> Vec<Piece> {
    let mut at = 0;
    let place = |&(file, offset, bytes): &(u16, u64, usize)| {
        let piece = Piece { file, offset, bytes, at };
        at += most_room(bytes);
        piece
    };
    pieces.iter().map(place).collect()
}

/// Whether a block holds what its pieces are.
fn holds(block: &[u8], pieces: &[Piece]) -> bool {
    pieces.iter().all(|piece| {
        let start = piece.at + skew(piece.offset);
        (0..piece.bytes).all(|i| block[start + i] == byte(piece.file.into(), piece.offset + i as u64))
    })
}

const LENGTHS: [u64; 2] = [70_001, 20_480];
const ROOM: usize = 3 * 7 * PAGE;

fn jobs() -> impl Strategy<Value = Vec<Vec<(u16, u64, usize)>>> {
    let piece = (0u16..2, 0u64..1 << 17, 0usize..20_000).prop_map(|(file, offset, bytes)| {
        let length = LENGTHS[usize::from(file)];
        let offset = offset % length;
        (file, offset, bytes.min((length - offset) as usize))
    });
    prop::collection::vec(prop::collection::vec(piece, 0..=MOST_PIECES), 1..12)
}

/// Reads all jobs with as many under way as there may be, and counts those that came with the right bytes.
fn all(reader: &mut Reader, jobs: &[Vec<Piece>], free: &mut Vec<Block<u8>>) -> (usize, Vec<ReadError>) {
    let (mut right, mut failed) = (0, vec![]);
    let mut next = 0;
    loop {
        while next < jobs.len() && reader.under_way() < JOBS {
            let mut block = free.pop().unwrap();
            block.fill(0xA5);
            reader.begin(next as u32, block, &jobs[next]).unwrap();
            next += 1;
        }
        reader.send();
        let Some(Done { tag, block, outcome }) = reader.finish().unwrap() else { break };
        match outcome {
            Ok(()) if holds(&block, &jobs[tag as usize]) => right += 1,
            Ok(()) => panic!("job {tag} has other bytes"),
            Err((piece, why)) => {
                assert!(piece < jobs[tag as usize].len());
                failed.push(why);
            }
        }
        free.push(block);
    }
    (right, failed)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Oracle: the files' bytes. Any pieces, also of no bytes and at the end of a file that ends at no page.
    #[test]
    fn what_is_read_is_what_the_file_holds(jobs in jobs()) {
        let files = Files::new(&LENGTHS);
        let jobs: Vec<_> = jobs.iter().map(|pieces| placed(pieces)).collect();
        let mut free = blocks(JOBS, ROOM);
        for mut reader in files.readers() {
            prop_assert_eq!(all(&mut reader, &jobs, &mut free), (jobs.len(), vec![]));
            prop_assert_eq!(free.len(), JOBS);
        }
    }

    /// Oracle: the files' bytes, whatever the system answers: reads that are shorter than asked for, by any number of bytes, and interrupted ones.
    #[test]
    fn answers_may_be_short(jobs in jobs(), seed in any::<u64>()) {
        let files = Files::new(&LENGTHS);
        let jobs: Vec<_> = jobs.iter().map(|pieces| placed(pieces)).collect();
        let mut free = blocks(JOBS, ROOM);
        for reader in files.readers() {
            let mut state = seed | 1;
            let direct = reader.files.direct;
            let mut reader = reader.with_faults(Box::new(move |answer| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                match (state % 4, answer) {
                    (0, Ok(_)) => Err(io::ErrorKind::Interrupted.into()),
                    // At least what makes the next read start further on.
                    (1, Ok(read)) if direct && read > PAGE => Ok(PAGE + state as usize / 8 % (read - PAGE)),
                    (1, Ok(read)) if !direct && read > 1 => Ok(1 + state as usize / 8 % (read - 1)),
                    (_, answer) => answer,
                }
            }));
            prop_assert_eq!(all(&mut reader, &jobs, &mut free), (jobs.len(), vec![]));
        }
    }
}

/// Oracle: the count. One read in so many fails, wherever: its job fails with the file's name and the system's word, the others are right, and all memory comes
/// back.
#[test]
fn an_error_fails_its_job_alone() {
    let files = Files::new(&LENGTHS);
    let jobs: Vec<_> =
        (0..40u64).map(|i| placed(&[(0, i * 999, 9000), (1, i * 77, 5000), (0, i, 1)])).collect();
    for every in [1, 5, 11] {
        for reader in files.readers() {
            let mut free = blocks(JOBS, ROOM);
            let mut asked = 0;
            let mut reader = reader.with_faults(Box::new(move |answer| {
                asked += 1;
                if asked % every == 0 { Err(io::Error::from_raw_os_error(5)) } else { answer }
            }));
            let (right, failed) = all(&mut reader, &jobs, &mut free);
            assert_eq!((right + failed.len(), free.len()), (jobs.len(), JOBS));
            assert!(failed.len() >= jobs.len() / every && (every == 1 || right > 0), "{right} of {every}");
            for why in failed {
                let why = why.to_string();
                assert!(why.contains(&name(files.0.path())) && why.contains("os error 5"), "{why}");
            }
        }
    }
}

/// Oracle: the sentence. A file that was cut off is named, with where it ends, and what lies before is read as ever.
#[test]
fn a_shorter_file_is_named() {
    for end in [0, 1, 4096, 9000, 12_288] {
        let files = Files::new(&LENGTHS);
        let readers = files.readers();
        OpenOptions::new().write(true).open(files.path(0)).unwrap().set_len(end).unwrap();
        for mut reader in readers {
            let mut free = blocks(JOBS, ROOM);
            let jobs =
                [placed(&[(1, 5, 9), (0, 8000, 6000)]), placed(&[(0, 0, end as usize), (1, 7, 13_000)])];
            let (right, failed) = all(&mut reader, &jobs, &mut free);
            assert_eq!((right, failed.len()), (1, 1), "{reader} of {end}");
            let why = failed[0].to_string();
            assert!(why.contains(&name(&files.path(0))) && why.contains("became shorter"), "{why}");
        }
    }
}

/// Oracle: that it ends, and that memory reads as the files do afterwards, for it is written by nobody any more. A reader is dropped with all of its jobs under way.
#[test]
fn what_is_under_way_is_waited_for() {
    let files = Files::new(&[4 << 20]);
    for round in 0..40 {
        for mut reader in files.readers() {
            for (tag, block) in blocks(JOBS, 2 << 20).into_iter().enumerate() {
                let piece = Piece { file: 0, offset: 4096 * round + tag as u64, bytes: 1 << 20, at: 0 };
                reader.begin(tag as u32, block, &[piece]).unwrap();
            }
            if round % 2 == 0 {
                reader.send();
            }
            if round % 3 == 0 {
                assert!(reader.finish().unwrap().is_some());
            }
        }
    }
}

/// Oracle: the sentence, and the block that comes back.
#[test]
fn what_makes_no_sense_is_refused() {
    let files = Files::new(&LENGTHS);
    for mut reader in files.readers() {
        let refuse = |reader: &mut Reader, block, piece| {
            let (why, block) = reader.begin(0, block, &[piece]).unwrap_err();
            assert_eq!(block.len(), 2 * PAGE);
            (why.to_string(), block)
        };
        let piece = Piece { file: 0, offset: 1, bytes: 100, at: 0 };
        let block = blocks(1, 2 * PAGE).remove(0);
        let (why, block) = refuse(&mut reader, block, Piece { file: 2, ..piece });
        assert!(why.contains("no file 2"), "{why}");
        let (why, block) = refuse(&mut reader, block, Piece { at: 64, ..piece });
        assert!(why.contains("no room"), "{why}");
        let (why, block) = refuse(&mut reader, block, Piece { bytes: 2 * PAGE, ..piece });
        assert!(why.contains("no room"), "{why}");
        let (why, block) = refuse(&mut reader, block, Piece { bytes: usize::MAX, offset: u64::MAX, ..piece });
        assert!(why.contains("no room"), "{why}");
        for other in blocks(JOBS, 2 * PAGE) {
            reader.begin(1, other, &[piece]).unwrap();
        }
        let (why, _) = refuse(&mut reader, block, piece);
        assert!(why.contains("under way"), "{why}");
        assert!(reader.finish().unwrap().is_some() && reader.under_way() == JOBS - 1);
    }
}

/// Oracle: the words. A file that can't be read past the page cache is read through it, which is said with the file's name and the reason.
#[test]
fn what_it_goes_without_is_said() {
    let files = Files::new(&[100]);
    let file = ReadFile {
        name: "the file".into(),
        file: File::open(files.path(0)).unwrap(),
        direct: Err(io::Error::from_raw_os_error(22)),
    };
    let spawn = &mut |_, work: Box<dyn FnOnce() + Send>| thread::Builder::new().spawn(work);
    let options = ReaderOptions { way: Way::Auto, direct: true, jobs: 2, threads: 9, spawn };
    let mut reader = Reader::new(vec![file], options).unwrap();
    let said = reader.fallback().unwrap().to_owned();
    assert!(
        said.contains("the file: ")
            && said.ends_with("positioned reads by 2 threads, through the page cache"),
        "{said}"
    );
    let mut free = blocks(JOBS, ROOM);
    assert_eq!(all(&mut reader, &[placed(&[(0, 1, 99)])], &mut free).0, 1);
    // And what was not wanted isn't missed.
    assert_eq!(files.reader(Way::Positioned, false).fallback(), None);
}
