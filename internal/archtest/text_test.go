package archtest

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A textRule is a construction that the project's texts avoid: sentences that are too long, filler,
// archaisms and metaphors that stand for a term of the field. Normal English of Go's standard library breaks no rule. Each rule
// has an example that it finds, and one that it accepts.
type textRule struct {
	name      string
	pattern   *regexp.Regexp // or nil
	finds     func(sentence string) string
	cure      string
	bad, good string
}

// mostWords is the limit of words in a sentence. About 20 are good.
const mostWords = 36

// textRules are checked in each sentence of comments, documents, error messages and help.
var textRules = []textRule{
	{
		name: "can be had", pattern: regexp.MustCompile(`\b(?:can|could|is to) be had\b|\bas far as\b`),
		cure: `write "if available", or name the condition`,
		bad:  "It is shown as far as it can be had.", good: "It is shown if available.",
	},
	{
		name: "idiom", pattern: regexp.MustCompile(`\b(?:lets? go of|letting go|gives? up on|comes? to an end|in the midst|so to speak|as it were|what there is|as such|such ones?)\b`),
		cure: "use a plain verb, and name the thing",
		bad:  "Close lets go of the block.", good: "Close releases the block.",
	},
	{
		name: "archaic", pattern: regexp.MustCompile(`\b(?:[Tt]hereof|[Tt]herein|[Tt]hereby|[Ww]hereby|[Ww]hereupon|[Hh]ereby|[Hh]ence|[Tt]hus far|[Ww]hilst|[Uu]pon|[Ll]est|[Ss]hall|[Aa]lbeit)\b`),
		cure: "use everyday words: in it, by this, so, while, on, otherwise, must",
		bad:  "It shall return upon completion.", good: "It returns when the operation completes.",
	},
	{
		name: "filler", pattern: regexp.MustCompile(`\b(?:of course|obviously|in order to|due to the fact|needless to say|it should be noted|note that|please|basically|simply|utili[sz]e[sd]?|leverages?|whether or not|respectively|and/or)\b`),
		cure: "delete the words, or use short ones",
		bad:  "It simply waits in order to read.", good: "It waits to read.",
	},
	{
		name: "glossary", pattern: regexp.MustCompile(`\b[Oo]wn kernels?\b|\b(?:stands? in for|stood in for)\b`),
		cure: `use the field's word: "Chorus kernels", "replaces"`,
		bad:  "The group's own kernels stand in for NCCL.", good: "Chorus kernels replace NCCL.",
	},
	{
		name: "metaphor", pattern: regexp.MustCompile(`\b(?:[Pp]ockets?|[Dd]esks?|[Rr]elays?|[Ff]arewell|[Pp]atience|[Ss]hel(?:f|ves)|[Ll]adder|[Cc]ourses?|[Cc]arriers?|[Cc]loths?|[Ll]ooms?)\b`),
		cure: "use the field's word: free list, timeout, schedule, reader, last message, fallback order",
		bad:  "A free block is on a shelf.", good: "A free block is in a free list.",
	},
	{
		name: "makes", pattern: regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*(?:\.[A-Za-z0-9]+)? makes\b`),
		cure: "say what the function does: returns, creates, allocates, enqueues, orders",
		bad:  "NewStream makes a stream.", good: "NewStream returns a stream. An error makes the job end.",
	},
	{
		name: "order", pattern: regexp.MustCompile(`\bin the order of\b`),
		cure: `write "stream-ordered", "once pending work on s has finished", "in file order", "sorted by size"`,
		bad:  "Alloc allocates in the order of s.", good: "Alloc returns stream-ordered memory.",
	},
	{
		name: "long", finds: tooLong,
		cure: fmt.Sprintf("split the sentence: at most %d words, about 20 are good", mostWords),
		bad:  strings.Repeat("word ", mostWords) + "more.", good: strings.Repeat("word ", mostWords-1) + "last.",
	},
}

// find returns the text that breaks a rule, or "".
func (r *textRule) find(sentence string) string {
	if r.finds != nil {
		return r.finds(sentence)
	}
	return r.pattern.FindString(sentence)
}

// tooLong returns the beginning of a sentence with too many words.
func tooLong(sentence string) string {
	words := strings.Fields(sentence)
	if len(words) <= mostWords {
		return ""
	}
	return strings.Join(words[:5], " ")
}

// textExceptions is a file with a line for each sentence that may break a rule: the file,
// the rule, a part of the sentence, and the reason, separated by tabs.
const textExceptions = "testdata/text_exceptions.txt"

// TestTexts checks comments, documents, error messages and help. make lint runs it.
func TestTexts(t *testing.T) {
	needSource(t)
	allowed := readExceptions(t)
	count := 0
	for _, u := range textUnits(t) {
		for _, s := range sentences(u.text) {
			count++
			for i := range textRules {
				r := &textRules[i]
				hit := r.find(s)
				if hit == "" || allowed.allow(u.file, r.name, s) {
					continue
				}
				t.Errorf("%s:%d: %q (%s): %s\n\t%s", u.file, u.line, hit, r.name, r.cure, s)
			}
		}
	}
	require.Greater(t, count, 5000, "the texts were not found")
	for _, e := range allowed {
		if !e.used {
			t.Errorf("%s: the exception is not needed any more: %s, %s, %q", textExceptions, e.file, e.rule, e.part)
		}
	}
}

// A textException allows a sentence to break a rule.
type textException struct {
	file, rule, part string
	used             bool
}

type exceptionList []*textException

func readExceptions(t *testing.T) (list exceptionList) {
	t.Helper()
	text, err := os.ReadFile(textExceptions)
	require.NoError(t, err)
	for n, line := range strings.Split(string(text), "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Split(line, "\t")
		require.Len(t, f, 4, "%s:%d: want a file, a rule, a part of the sentence and a reason", textExceptions, n+1)
		require.True(t, slices.ContainsFunc(textRules, func(r textRule) bool { return r.name == f[1] }), "%s:%d: no rule %q", textExceptions, n+1, f[1])
		require.NotEmpty(t, f[3], "%s:%d: no reason", textExceptions, n+1)
		list = append(list, &textException{file: f[0], rule: f[1], part: f[2]})
	}
	return list
}

// allow reports whether a sentence may break a rule. A folder that ends in a slash stands for
// its files.
func (l exceptionList) allow(file, rule, sentence string) bool {
	for _, e := range l {
		if e.rule == rule && (e.file == file || strings.HasSuffix(e.file, "/") && strings.HasPrefix(file, e.file)) && strings.Contains(sentence, e.part) {
			e.used = true
			return true
		}
	}
	return false
}

// The rules must find what they forbid, and nothing in plain text.
func TestTextRules(t *testing.T) {
	for i := range textRules {
		r := &textRules[i]
		require.NotEmpty(t, r.find(r.bad), "%s: %q", r.name, r.bad)
		for k := range textRules {
			require.Empty(t, textRules[k].find(r.good), "%s finds the cure of %s: %q", textRules[k].name, r.name, r.good)
		}
		require.NotEmpty(t, r.cure)
	}
	require.Equal(t, []string{"One is 1.5 long, e.g. a.b.", "Two ends!", "Three: (four)"}, sentences("One is 1.5 long, e.g. a.b. Two\nends! Three: (four)"))
}
