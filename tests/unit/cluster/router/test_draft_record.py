from cluster.router.draft_record import AS_EXPECTED, BETTER, WORSE, DraftRecord


def test_a_text_has_a_record_of_how_its_sources_have_fared():
    record = DraftRecord(3)
    assert record.classes == [AS_EXPECTED] * 3
    for _ in range(12):
        record.add([4, 4, 0], [3, 0, 0], [1.0, 2.0, 0.0])
    assert record.classes == [BETTER, WORSE, AS_EXPECTED]
    for outcome, right in zip(record.outcomes, (3, 0, 0), strict=True):
        assert sum(outcome[0::2]) == (0 if outcome is record.outcomes[2] else 12 * 4)
        assert sum(outcome[1::2]) == 12 * right
    assert record.outcomes[0][2 * WORSE :: 2] == [0, record.outcomes[0][2 * BETTER]], "each in the class it was made in"
    assert record.outcomes[0][0] > 0, "the first were made before anything was known"
    assert record.outcomes[1][2 * BETTER] == 0 < record.outcomes[1][2 * WORSE]
    for _ in range(100):
        record.add([0, 4, 0], [0, 2, 0], [0.0, 2.0, 0.0])
    assert record.classes == [BETTER, AS_EXPECTED, AS_EXPECTED]
