package cluster

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseNodeList(t *testing.T) {
	for in, want := range map[string]string{
		"n1":                      "n1",
		"n1,n2":                   "n1 n2",
		"gpu[01-03]":              "gpu01 gpu02 gpu03",
		"gpu[9-11]":               "gpu9 gpu10 gpu11",
		"gpu[01-02,07],login":     "gpu01 gpu02 gpu07 login",
		"r[1-2]n[0-1]":            "r1n0 r1n1 r2n0 r2n1",
		"a[1-2]-ib,b":             "a1-ib a2-ib b",
		"node-[099-101].example.": "node-099.example. node-100.example. node-101.example.",
		"[1-2]":                   "1 2",
	} {
		got, err := parseNodeList(in)
		require.NoError(t, err, in)
		require.Equal(t, want, strings.Join(got, " "), in)
	}
	for _, in := range []string{"", ",", "a,", ",a", "a[", "a]", "a[]", "a[1", "a[[1]]", "a[2-1]", "a[x]", "a[1-]",
		"a[-1]", "a[1-99999999]", "a[0-9999]b[0-9999]", "a[1,,2]", "a[1-4294967296]"} {
		_, err := parseNodeList(in)
		require.Error(t, err, in)
	}
}

func TestParseTasksPerNode(t *testing.T) {
	for in, want := range map[string][]int{"4": {4}, "4(x2),3": {4, 4, 3}, "1,2,3": {1, 2, 3}, "2(x1)": {2}} {
		got, err := parseTasksPerNode(in)
		require.NoError(t, err, in)
		require.Equal(t, want, got, in)
	}
	for _, in := range []string{"", "x", "4(x0)", "4(x)", "4(x2", "4x2", "4(x99999999)", "-1", "4,,3"} {
		_, err := parseTasksPerNode(in)
		require.Error(t, err, in)
	}
}

func FuzzParseNodeList(f *testing.F) {
	for _, s := range []string{"gpu[01-03,7],login", "r[1-2]n[0-1]", "a[", "a]b[1-2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		hosts, err := parseNodeList(s)
		if err != nil {
			return
		}
		require.NotEmpty(t, hosts)
		require.LessOrEqual(t, len(hosts), maxListed)
		for _, h := range hosts {
			require.NotContains(t, h, "[")
			require.NotContains(t, h, ",")
		}
	})
}

func FuzzParseTasksPerNode(f *testing.F) {
	f.Add("4(x2),3")
	f.Add("4(x")
	f.Fuzz(func(t *testing.T, s string) {
		counts, err := parseTasksPerNode(s)
		require.True(t, err != nil || len(counts) > 0 && len(counts) <= maxListed)
	})
}
