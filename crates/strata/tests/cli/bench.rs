//! `strata bench`: the form of what it reports; speeds are nobody's test.

use crate::program::{Place, golden};

/// Oracle: medians lie between their extremes, and shares add up.
#[test]
fn reports_every_kind() {
    let args =
        ["bench", &golden("tiny/tiny.gguf"), "--prompt", "16,40", "--gen", "8", "--reps", "3", "--json"];
    let json = Place::new().run(&args).json();
    // 16 tokens fit a window, and so do 40: nothing comes after them.
    assert_eq!(json["read_ahead"]["warmed"], 0);
    let results = json["results"].as_array().unwrap();
    let kinds: Vec<_> =
        results.iter().map(|r| (r["what"].as_str().unwrap(), r["tokens"].as_u64().unwrap())).collect();
    assert_eq!(kinds, [("prompt", 16), ("prompt", 40), ("answer", 8)]);
    for result in results {
        let rate = |name: &str| result[name].as_f64().unwrap();
        assert!(0.0 < rate("slowest") && rate("slowest") <= rate("tokens_per_second"));
        assert!(rate("tokens_per_second") <= rate("fastest") && rate("bytes_per_second") > 0.0);
        let families = result["families"].as_array().unwrap();
        let shares: f64 = families.iter().map(|f| f["share"].as_f64().unwrap()).sum();
        assert!((shares - 1.0).abs() < 1e-9 && families.len() >= 8, "{families:?}");
    }
    let text = Place::new().run(&args[..args.len() - 1]).well();
    assert!(text.contains("rows read ahead: 0, dropped 0, failed 0"), "{text}");
    assert!(text.contains("tokens/s") && text.contains("experts") && text.contains("GB/s"), "{text}");
}

/// Oracle: the sentences.
#[test]
fn nothing_to_measure_is_refused() {
    let (place, model) = (Place::new(), golden("tiny/tiny.gguf"));
    place.run(&["bench", &model, "--prompt", "0", "--gen", "0"]).badly(2, &["--prompt", "--gen"]);
    place.run(&["bench", &model, "--reps", "0"]).badly(2, &["--reps"]);
    place.run(&["bench", &model, "--prompt", "513"]).badly(2, &["--prompt 513", "512"]);
}
