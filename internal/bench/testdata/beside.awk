# Two files of names and times in µs, one of Chorus and one of its peer: their medians, and
# what Chorus takes of the peer's.
FNR == 1 { file++ }
file == 1 { if (!($1 in ours)) order[++count] = $1; ours[$1] = ours[$1] " " $2 }
file == 2 { theirs[$1] = theirs[$1] " " $2 }
END {
	printf "%-40s %12s %12s %7s\n", "", "Chorus", peer, "ratio"
	for (i = 1; i <= count; i++) {
		a = median(ours[order[i]]); b = median(theirs[order[i]])
		printf "%-40s %9.3f us %9.3f us %7s\n", order[i], a, b, (b > 0 ? sprintf("%.3f", a / b) : "-")
	}
}
