package analyze

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// PyTorch's dumps do not contain the rank that wrote them. A pattern of the user finds it in the path. Otherwise "rank_N" in the
// name has it, or a number at the end of the name that the content permits. Sends and receives in the content have it, too. If all
// other ranks of the job have files, it is the one that is left, and if several are, the file stands for the rank.

// stem is the name of a file without its folder, compression and rank: files of one job have the same.
func stem(file string) string {
	base := strings.TrimSuffix(strings.TrimSuffix(file, ".gz"), ".zst")
	name := filepath.Base(base)
	if at := afterRank.FindStringSubmatchIndex(name); at != nil {
		name = name[:at[2]] + name[at[3]:]
	} else {
		name = strings.TrimRight(name, "0123456789")
	}
	return filepath.Join(filepath.Dir(base), name)
}

// afterRank matches the rank in the name of a file.
var afterRank = regexp.MustCompile(`rank_?([0-9]+)`)

// worldOf returns the rank that a file's name contains. certain says that it follows the word rank.
func worldOf(file string) (rank int, certain, ok bool) {
	base := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(file), ".gz"), ".zst")
	// A copy may have more numbers, as in nccl_trace_rank_0.1 or rank_0_attempt_1.
	if m := afterRank.FindStringSubmatch(base); m != nil {
		if rank, err := strconv.Atoi(m[1]); err == nil && rank < mostRanks {
			return rank, true, true
		}
	}
	digits := base[len(strings.TrimRight(base, "0123456789")):]
	rank, err := strconv.Atoi(digits)
	ok = err == nil && rank < mostRanks && len(digits) < len(base) && !strings.ContainsAny(strings.TrimSuffix(base, digits), "0123456789")
	return rank, false, ok
}

// setRank sets the rank of a dump of PyTorch if the file alone determines it.
func (d *dump) setRank(pattern *regexp.Regexp) error {
	d.world = -1
	if d.fromChorus() || d.service != nil {
		return nil
	}
	if pattern != nil {
		m := pattern.FindStringSubmatch(d.file)
		if len(m) < 2 {
			return fmt.Errorf("the pattern %q of the flag --rank-pattern does not match the file's path, or has no group in parentheses", pattern)
		}
		rank, err := strconv.Atoi(m[1])
		if err != nil || rank >= mostRanks {
			return fmt.Errorf("the pattern %q of the flag --rank-pattern finds the rank %.40q in the file's path: want a number below %d", pattern, m[1], mostRanks)
		}
		d.world = rank
		return nil
	}
	if err := d.findCandidates(); err != nil {
		return err
	}
	rank, certain, ok := worldOf(d.file)
	switch {
	case ok && (certain || slices.Contains(d.candidates, rank)):
		d.world = rank
	case len(d.candidates) == 1:
		d.world = d.candidates[0]
	}
	return nil
}

// findCandidates sets the ranks that may have written a dump: all groups with operations have them, and sends and receives name
// the one that issued them.
func (d *dump) findCandidates() error {
	var list []int
	narrow := func(to []int) {
		if list == nil {
			list = slices.Clone(to)
			return
		}
		list = slices.DeleteFunc(list, func(rank int) bool { return !slices.Contains(to, rank) })
	}
	byGroup, _ := d.divide()
	for id, c := range d.config {
		all, err := ranksOf(c.Ranks)
		if err != nil {
			return err
		}
		if len(all) > len(d.all) {
			d.all = all
		}
		if len(byGroup[id]) == 0 {
			continue
		}
		narrow(all)
		for _, e := range byGroup[id] {
			if e.peer >= 0 && e.self < len(all) {
				narrow(all[e.self : e.self+1])
				break
			}
		}
	}
	if list == nil {
		list = slices.Clone(d.all)
	}
	if len(list) == 0 {
		return errors.New("no rank is in all groups whose operations the file has: it is not the dump of one process")
	}
	d.candidates = list
	return nil
}

// setOtherRanks sets the ranks that the files do not determine alone, of dumps of one job.
func setOtherRanks(dumps []*dump) {
	taken := map[int]bool{}
	var open []*dump
	for _, d := range dumps {
		switch {
		case d.fromChorus() || d.service != nil || d.unread:
		case d.world >= 0:
			taken[d.world] = true
		default:
			open = append(open, d)
		}
	}
	left := func(d *dump) []int {
		return slices.DeleteFunc(slices.Clone(d.candidates), func(rank int) bool { return taken[rank] })
	}
	for again := true; again; {
		again = false
		open = slices.DeleteFunc(open, func(d *dump) bool {
			list := left(d)
			if len(list) != 1 {
				return false
			}
			d.world, d.eliminated, again = list[0], true, true
			taken[list[0]] = true
			return true
		})
	}
	slices.SortStableFunc(open, func(a, b *dump) int { return cmp.Compare(len(a.candidates), len(b.candidates)) })
	for _, d := range open {
		if list := left(d); len(list) > 0 {
			d.world, d.guessed = list[0], true
			taken[list[0]] = true
		}
	}
}
