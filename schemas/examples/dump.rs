fn main() {
    for a in std::env::args().skip(1) {
        let m = anemone_schemas::aimodel::asset::open_asset(a.as_ref());
        match m {
            Ok(m) => {
                println!(
                    "{}",
                    anemone_schemas::aimodel::text::to_text(
                        &m,
                        &anemone_schemas::aimodel::text::TextOptions {
                            decompositions: true,
                            max_elements: 8
                        }
                    )
                );
                if let Err(e) = anemone_schemas::aimodel::check::check(&m) {
                    eprintln!("{a}: {e}");
                }
            }
            Err(e) => eprintln!("{a}: {e}"),
        }
    }
}
