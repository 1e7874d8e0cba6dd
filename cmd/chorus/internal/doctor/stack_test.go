package doctor

import "testing"

func TestStack(t *testing.T) {
	try(t, stack,
		change{"unlimited", limits("Max stack size unlimited unlimited bytes"), Warn, "ulimit -s 8192"},
		change{"no line", limits(""), Unknown, "no line"},
	)
}
