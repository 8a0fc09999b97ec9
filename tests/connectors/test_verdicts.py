"""What an engine hears about keys that it asks for one by one."""

from kvstore import api
from kvstore.connectors.verdicts import MISS, Verdicts

KEYS = [bytes([number]) for number in range(8)]


class Questions:
    """Answers are given when the test says so."""

    def __init__(self):
        self.asked, self.answers = [], {}

    def look(self, keys):
        self.asked.append(list(keys))
        return _Look(self, len(self.asked) - 1)

    def answer(self, number, *tiers):
        self.answers[number] = api.Found(run=len(tiers), tiers=list(tiers))


class _Look:
    def __init__(self, questions, number):
        self._questions, self._number = questions, number

    def poll(self, wait_s):
        assert wait_s == 0.0  # an engine's step never waits
        return self._questions.answers.get(self._number)


def step(verdicts, request="r", keys=KEYS, group=0):
    """One step of an engine that scans a prefix: it goes on past what is not known, and stops at what is missing."""
    heard = []
    for key in keys:
        heard.append(verdicts.of(key, request, group))
        if heard[-1] == MISS:
            break
    verdicts.ask()
    return heard


def test_one_question_for_all_keys_of_a_step_and_one_answer_for_each():
    questions = Questions()
    verdicts = Verdicts(questions.look)
    assert step(verdicts) == [None] * 8
    assert step(verdicts) == [None] * 8
    assert questions.asked == [KEYS]
    questions.answer(0, "dram", "dram", "bucket")
    assert step(verdicts) == ["dram", "dram", "bucket", MISS]
    assert step(verdicts) == ["dram", "dram", "bucket", MISS]
    assert questions.asked == [KEYS]
    assert verdicts.near(KEYS) == 2
    assert verdicts.near(KEYS[1:2]) == 1


def test_requests_and_groups_are_asked_for_apart_and_keys_once():
    questions = Questions()
    verdicts = Verdicts(questions.look)
    verdicts.of(KEYS[0], "a", 0)
    verdicts.of(KEYS[1], "a", 1)
    verdicts.of(KEYS[0], "b", 0)
    verdicts.of(KEYS[2], "b", 0)
    verdicts.ask()
    assert questions.asked == [[KEYS[0]], [KEYS[1]], [KEYS[2]]]


def test_a_window_that_reaches_before_a_missing_key_asks_again_and_not_for_ever():
    questions = Questions()
    verdicts = Verdicts(questions.look)
    backwards = KEYS[::-1]

    def scan():
        heard = [verdicts.of(key, "r", 0) for key in backwards]
        verdicts.ask()
        return heard

    scan()
    for number in range(4):
        questions.answer(number)  # the first key asked for is missing
        scan()
    assert questions.asked == [backwards[number:] for number in range(4)]
    assert scan() == [MISS] * 8


def test_what_failed_to_load_stays_missing_whatever_a_late_answer_says():
    questions = Questions()
    verdicts = Verdicts(questions.look)
    step(verdicts, keys=KEYS[:2])
    verdicts.miss(KEYS[:1])
    questions.answer(0, "dram", "dram")
    assert step(verdicts, keys=KEYS[:2]) == [MISS]
    assert verdicts.of(KEYS[1], "r", 0) == "dram"


def test_nothing_is_kept_of_requests_that_ended():
    questions = Questions()
    verdicts = Verdicts(questions.look)
    step(verdicts, "a")
    step(verdicts, "b", KEYS[:1])
    verdicts.of(KEYS[7], "a", 0)
    verdicts.forget("a")
    verdicts.forget("never seen")
    verdicts.ask()
    questions.answer(0, *["nvme"] * 8)
    assert step(verdicts, "b", KEYS[:1]) == ["nvme"]
    verdicts.forget("b")
    assert not verdicts._keys
    assert not verdicts._requests
    assert step(verdicts, "c", KEYS[:1]) == [None]  # asked anew: it may be gone
    assert questions.asked[-1] == KEYS[:1]


def test_a_request_that_ends_before_the_step_does_is_not_asked_for():
    questions = Questions()
    verdicts = Verdicts(questions.look)
    verdicts.of(KEYS[0], "a", 0)
    verdicts.forget("a")
    verdicts.ask()
    assert questions.asked == []
