package cluster

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// simSchedules are schedules that have found faults, shrunk. The seed is that of the random job.
var simSchedules = []struct{ name, text string }{
	{"a connected host without workers counted although it had not answered", `
job seed=5000945 hosts=4 late=0 least=1 local=1 seeds=1 restarts=0 pace=322703 latency=57µs lost-after=1s
+1.51s freeze a - 550.259ms 0s
+1.686839s split a ^a 1.046114s 0s
+650ms worker b - 0s 1ns`},
	{"a connected host without workers counted, and packets were lost in one direction", `
job seed=4005481 hosts=5 late=0 least=1 local=1 seeds=1 restarts=0 pace=734015 latency=1.305ms lost-after=1s
+2.241s worker d - 0s 1ns
+2.662s cut ab ^ab 0s 0s`},
	{"several hosts were asked to leave", `
job seed=4000110 hosts=5 late=0 least=1 local=1 seeds=1 restarts=0 pace=291584 latency=398µs lost-after=1s
+2.613s drain a - 0s 0s
+2.75s split e ^e 1.36571s 0s
+2.925588s drain c - 0s 0s
+2.926877s split bce ^bce 1.539479s 0s
commit2+42µs heal - - 0s 0s
commit3+12µs drain d - 0s 0s`},
	{"a host that was asked to leave took the job over, and left before the others could choose another", `
job seed=926070407 hosts=5 late=0 least=1 local=1 seeds=1 restarts=2 pace=197687 latency=60µs lost-after=1s calm=44s
+1.775s drain b - 0s 0s
+1.527s split a ^a 2.107769s 0s`},
	{"a reset and silence proved an end", `
job seed=5002528 hosts=3 late=0 least=1 local=1 seeds=1 restarts=0 pace=674608 latency=2.532ms lost-after=3s
+7.379s firewall a ^a 3.365695s 0s`},
	{"a coordinator that others had replaced won a host back", `
job seed=5001808 hosts=4 late=0 least=1 local=1 seeds=2 restarts=2 pace=864459 latency=3.991ms lost-after=1s
+1.782s split a ^a 2.603893s 0s
commit2+6µs heal - - 0s 0s
commit2+7µs split * c 0s 0s`},
	{"a coordinator that did not hear the majority ordered their launchers to kill the workers", `
job seed=8003426 hosts=3 late=0 least=1 local=2 seeds=1 restarts=0 pace=137797 latency=1.446ms lost-after=1s calm=44s
+1.599s reject bc a 2.7077s 0s`},
	{"a coordinator that did not hear the majority ended the job", `
job seed=8003122 hosts=3 late=0 least=2 local=1 seeds=2 restarts=0 pace=814154 latency=62µs lost-after=3s calm=1m40s
+1.426123s cut ^a a 0s 0s`},
	{"a coordinator that others had replaced won a host back, and a third one coordinated", `
job seed=7001390 hosts=5 late=1 least=1 local=1 seeds=1 restarts=0 pace=945015 latency=76µs lost-after=3s calm=0s
+564.104ms split abce a 11.414782s 0s
commit2+2µs heal - - 0s 0s
commit2+3µs split * c 0s 0s`},
	{"a starved coordinator", `
job seed=7001650 hosts=3 late=1 least=1 local=1 seeds=1 restarts=0 pace=818668 latency=525µs lost-after=3s calm=1m40s
+4.87s starve a - 6.795071s 0s
+4.261s starve * - 7.451915s 0s`},
	{"a candidate did not count a host that had agreed to another epoch and ended", `
job seed=11000279 hosts=4 late=0 least=2 local=2 seeds=1 restarts=0 pace=1044431 latency=227µs lost-after=1s calm=0s
+48.079ms split ac ^ac 0s 28.936ms
commit2+42µs split * c 0s 0s
+1.226s heal - - 0s 0s`},
	{"a candidate did not count a host that had left with the agreement of the coordinator", `
job seed=11000233 hosts=4 late=0 least=1 local=1 seeds=1 restarts=0 pace=797773 latency=1.655ms lost-after=1s calm=0s
+20.659ms split bc a 3.217365s 0s
+114ms drain d - 0s 0s`},
	{"a candidate did not count a host that had ended as a minority", `
job seed=11000108 hosts=4 late=0 least=1 local=1 seeds=1 restarts=1 pace=527625 latency=333µs lost-after=1s calm=0s
+1.059ms firewall d ^d 1.404281s 2ns
+113.314ms split c a 0s 129.364ms
commit2+8.216ms split * ^* 1.312562s 247.356ms`},
	{"a host that had ended did not count, although it had agreed on an epoch with a silent one", `
job seed=3 hosts=4 late=0 least=1 local=1 seeds=1 restarts=0 pace=-1 latency=200µs lost-after=1s calm=0s
+1s split bd a 1.15s 0s
+1s split c bd 0s 0s
+1.9s freeze bd - 450ms 0s
+2.145s kill a - 0s 0s`},
	{"a host that was frozen proved the end of a coordinator that had gone on without it, with a newcomer", `
job seed=3 hosts=2 late=1 least=1 local=1 seeds=2 restarts=0 pace=-1 latency=200µs lost-after=1s calm=0s
+1s split a b 2.6s 0s
+1s split c b 0s 0s
+1.5s freeze b - 2.3s 0s
+2.2s join c - 0s 0s
+3.5s kill a - 0s 0s`},
	{"some hosts gave up a coordinator that led the others, and did not find back to it", `
job seed=811647445 hosts=5 late=0 least=1 local=2 seeds=1 restarts=2 pace=951871 latency=171µs lost-after=1s calm=44s
+1.713s split a ^a 1.324951s 170.037ms
commit2+40µs split * e 0s 170.037ms`},
	{"a host gave up a coordinator that was frozen, and did not find back to it", `
job seed=811685359 hosts=3 late=0 least=1 local=1 seeds=1 restarts=2 pace=523604 latency=1.637ms lost-after=1s calm=44s
+528ms drain a - 0s 0s
+704.515ms freeze a - 874.824ms 0s`},
	{"a firewall reset the coordinator's ends, and the workers of all other hosts had less time than their launchers", `
job seed=312602064 hosts=3 late=0 least=2 local=1 seeds=1 restarts=0 pace=197711 latency=209µs lost-after=3s calm=1m40s
+7.65s firewall a ^a 2.612689s 1ns`},
	{"the same after a proposal, which the launchers had answered late", `
job seed=312591786 hosts=5 late=0 least=2 local=1 seeds=1 restarts=1 pace=966820 latency=1.322ms lost-after=3s calm=1m40s
+6.660411s worker e - 0s 0s
commit2+12µs firewall a ^a 3.292292s 1ns`},
	// The coordinator hears no other host for 90 % of the limit. It lost the first of them that had not connected again a moment later.
	{"the coordinator is alone for almost the limit", `
job seed=442825876 hosts=5 late=0 least=2 local=1 seeds=1 restarts=0 pace=870440 latency=514µs lost-after=1s calm=44s
+2.91131s split * ^* 905.647ms 0s`},
	// The limit of the workers of c and d ended a moment before the network returned, that of their launchers did not.
	{"workers lost a coordinator that their launchers followed", `
job seed=20758773 hosts=4 late=0 least=2 local=1 seeds=3 restarts=0 pace=232792 latency=242µs lost-after=1s calm=44s
+847ms split bcd ^bcd 1.009377s 21.939ms
+686ms worker a - 0s 0s`},
	// The last host of the epoch has no workers, and may not start any. It succeeded the coordinator, which left, and said that the job had succeeded.
	{"a host without workers coordinates a program that has not ended", `
job seed=148655542 hosts=3 late=0 least=1 local=2 seeds=1 restarts=0 pace=879290 latency=217µs lost-after=1s calm=44s
commit2+2µs split * ^* 1.15757s 180.651ms
+1.61s drain a - 0s 0s
+2.012s split a ^a 1.037696s 96.315ms`},
	// All functions return nil while two hosts wait for the next epoch.
	{"an epoch began after the program had ended", `
job seed=962383931 hosts=5 late=0 least=1 local=1 seeds=1 restarts=1 pace=126874 latency=6.722ms lost-after=3s calm=0s
+197.54ms split a ^a 3.503916s 457.629ms
end1+3µs split a ^a 3.503916s 457.629ms
+150.01592ms complete - - 0s 0s`},
	{"a host that was lost at the end of the program failed the job", `
job seed=822509379 hosts=5 late=0 least=1 local=1 seeds=3 restarts=1 pace=904755 latency=2.306ms lost-after=3s calm=1m40s
end1+782µs replace b - 60.338ms 0s
+3.75031s complete - - 0s 0s`},
	{"the coordinator was drained after the end of the program", `
job seed=720451557 hosts=3 late=0 least=2 local=2 seeds=1 restarts=0 pace=1010966 latency=88µs lost-after=3s calm=1m40s
end1+16.159ms drain a - 0s 0s
+2.60788491s complete - - 0s 0s`},
	// The only member of the epoch was dismissed, and c has no workers and may start none.
	{"the exit of a process that was dismissed counted as the end of the program", `
job seed=972094242 hosts=3 late=1 least=1 local=1 seeds=3 restarts=0 pace=412118 latency=2.711ms lost-after=3s calm=1m40s
+4.091s worker a - 0s 0s
+4.457842s worker c - 0s 0s
commit2+28.514ms drain ab - 0s 0s`},
	// a and b begin the job again while c looks for its coordinator.
	{"the end of another run was taken for the end of this one", `
job seed=893149401 hosts=3 late=1 least=1 local=1 seeds=3 restarts=2 pace=578952 latency=201µs lost-after=1s calm=44s
+2.675s power b - 655.714ms 0s
+2.770592s power a - 144.696ms 0s
+2.773004s complete - - 0s 0s`},
	{"a worker that was started again looked for the coordinator after the end of the program", `
job seed=893150419 hosts=3 late=0 least=1 local=1 seeds=3 restarts=1 pace=322739 latency=219µs lost-after=1s calm=44s
+1.15s worker c - 0s 1ns
+1.18098s split * ^* 1.056909s 37.427ms
+1.254102s complete - - 0s 0s`},
	{"a host that came back to a coordinator that had finished was refused", `
job seed=972082139 hosts=5 late=0 least=2 local=1 seeds=2 restarts=1 pace=305408 latency=948µs lost-after=1s calm=44s
end1+15µs freeze a - 889.511ms 0s
+1.711886s complete - - 0s 0s`},
	// b loses the coordinator 0.16 s before it continues, which ends a second later.
	{"a host that had lost its coordinator did not learn that the program had ended", `
job seed=994474385 hosts=3 late=0 least=1 local=1 seeds=2 restarts=2 pace=799290 latency=4.666ms lost-after=3s calm=1m40s
+2.674307279s freeze a - 2.88423998s 0s
commit2+3.247ms complete - - 0s 0s`},
	{"a reset proved the end of two launchers after the end of the program, and they began another epoch", `
job seed=954274723 hosts=4 late=0 least=1 local=1 seeds=3 restarts=1 pace=935526 latency=3.072ms lost-after=1s calm=44s
end1+4.019ms firewall bc ^bc 958.359407ms 0s
+2.879181718s complete - - 0s 0s`},
	{"a host did not learn from the next coordinator that the program had ended", `
job seed=543420332 hosts=5 late=0 least=1 local=1 seeds=3 restarts=1 pace=750616 latency=11.698ms lost-after=3s calm=1m40s
end1+16.56ms split a ^a 3.070335413s 0s
+582.63708ms complete - - 0s 0s`},
	{"launchers that had heard of the end of the program left before the others had asked them", `
job seed=982412618 hosts=5 late=0 least=1 local=1 seeds=2 restarts=2 pace=950824 latency=10.669ms lost-after=3s calm=1m40s
end1+1.574ms split a ^a 2.795911853s 0s
+688.811146ms complete - - 0s 0s`},
	// The launcher of a waited for a connection that a peer had continued after a had written its last message.
	{"a launcher did not end", `
job seed=925322349 hosts=4 late=0 least=1 local=1 seeds=2 restarts=1 pace=584512 latency=386µs lost-after=3s calm=1m40s
propose1+697µs firewall * ^* 3.434018s 2ns
+4.709s firewall cd ^cd 3.321796s 0s`},
	{"a worker worked on in an old epoch, because its launcher, stopped twice, still followed the coordinator", `
job seed=279724648 hosts=3 late=0 least=1 local=1 seeds=2 restarts=0 pace=949256 latency=719µs lost-after=3s calm=1m40s
commit2+2.177ms stop bc - 3.133523s 1ns
+6.966s stall ab ^ab 10.070409s 0s
+5.749s stop c - 3.739343s 0s`},
	{"a host that an earlier coordinator had lost did not learn that the program had ended", `
job seed=705863696 hosts=4 late=0 least=1 local=1 seeds=1 restarts=1 pace=1018383 latency=53µs lost-after=1s calm=44s
+446ms cut a ^a 985.973ms 0s
end1+2µs cut a ^a 0s 0s
+446.004ms complete - - 0s 0s`},
	// a loses c, and b loses a and returns to it.
	{"a host that the coordinator had lost for silence waited for other hosts, which had returned to it", `
job seed=847365781 hosts=5 late=0 least=1 local=2 seeds=3 restarts=0 pace=212222 latency=257µs lost-after=3s calm=1m40s
+5.993s reject ^ad ad 2.871668s 0s
+8.455154s complete - - 0s 0s`},
	// d has lost its power after it had registered with b.
	{"a candidate waited for the vote of a host that had vanished for five times the limit of silence", `
job seed=427769505 hosts=5 late=0 least=1 local=2 seeds=1 restarts=0 pace=1044503 latency=553µs lost-after=3s calm=1m40s
+3.745s split a ^a 5.32052s 297.142ms
+7.33s power d - 0s 0s`},
	{"a host took the coordinator that had replaced it, at its address, for its own", `
job seed=441777629 hosts=4 late=0 least=1 local=1 seeds=2 restarts=0 pace=62558 latency=79µs lost-after=1s calm=44s
+762ms split b ^b 998.011ms 0s
+780ms drain * - 0s 0s
+1.324s replace b - 64.658ms 1ns`},
	// c knows that epoch 3 has begun.
	{"a host gave up, because the epoch that was proposed to it had perhaps not begun", `
job seed=445775941 hosts=3 late=0 least=1 local=1 seeds=1 restarts=0 pace=718601 latency=10.03ms lost-after=3s calm=1m40s
+2.109s split * ^* 2.926763s 74.997ms
commit3+5.979ms split a ^a 6.181977s 155.066ms`},
	{"a host that could not choose a coordinator did not return to the one that it had lost", `
job seed=433756915 hosts=3 late=0 least=2 local=1 seeds=1 restarts=1 pace=621350 latency=55µs lost-after=1s calm=44s
+1.035s split a ^a 971.229ms 0s
end1+76.649ms split a ^a 971.229ms 0s
+1.573654s complete - - 0s 0s`},
	{"a lost launcher was told that the job had ended, and waited for an order", `
job seed=440764947 hosts=4 late=1 least=1 local=1 seeds=3 restarts=0 pace=843749 latency=6.393ms lost-after=3s calm=1m40s
+6.641s stop cd - 5.958773s 2ns
+7.64104s stop a - 4.024909s 2ns
+7.654316s stop b - 3.018311s 0s
end1+11µs stop b - 3.018311s 0s
end1+1.010343s stop b - 3.018311s 0s
+9.566127s complete - - 0s 0s`},
	{"a coordinator that was asked to leave stopped the job, because hosts that it had just lost did not count", `
job seed=444760765 hosts=4 late=0 least=2 local=1 seeds=1 restarts=0 pace=740077 latency=1.379ms lost-after=3s calm=1m40s
+886.239ms stop a - 2.844192s 0s
+922.481ms drain a - 0s 0s`},
	{"a coordinator that had taken over and was asked to leave stopped the job before the others had come", `
job seed=444766565 hosts=5 late=0 least=2 local=1 seeds=1 restarts=1 pace=622037 latency=797µs lost-after=1s calm=44s
+1.295s drain ab - 0s 0s
+1.311085s split a ^a 1.047315s 43.6ms`},
	{"the coordinator was replaced before a lost host had learned from it that the program had ended", `
job seed=435743353 hosts=3 late=0 least=1 local=1 seeds=1 restarts=0 pace=59288 latency=1.457ms lost-after=3s calm=1m40s
+6.333s split a ^a 2.824784s 0s
commit2+166µs replace a - 764.787ms 1ns
+7.288563s complete - - 0s 0s`},
	{"a host looked for the coordinator that it had lost only once a second", `
job seed=437746117 hosts=5 late=0 least=1 local=1 seeds=1 restarts=0 pace=780221 latency=1.067ms lost-after=1s calm=44s
+1.103s split ad ^ad 1.0145s 0s
end1+51.823ms split ad ^ad 1.0145s 0s
end1+325.287ms split ad ^ad 1.0145s 0s
+2.850595s complete - - 0s 0s`},
	{"hosts that knew of different proposals preferred different candidates, and none had enough votes", `
job seed=440745503 hosts=5 late=0 least=2 local=1 seeds=1 restarts=2 pace=775997 latency=231µs lost-after=1s calm=44s
commit2+456µs split a ^a 1.12617s 0s
+1.041s split acde ^acde 3.400407s 0s`},
	{"hosts that knew of different ends preferred different candidates, and none had enough votes", `
job seed=441694811 hosts=5 late=0 least=2 local=1 seeds=3 restarts=0 pace=648129 latency=752µs lost-after=1s calm=44s
+220.899ms power a - 687.836ms 0s
+2.388s power b - 1.241782s 0s`},
	{"hosts connected again only where the name of the coordinator led", `
job seed=440695182 hosts=5 late=0 least=2 local=1 seeds=1 restarts=0 pace=941310 latency=59µs lost-after=3s calm=1m40s
+2.21s reset * ^* 0s 1ns
+2.278252s replace a - 368.465ms 1ns`},
	{"a launcher that was drained at the end of the program did not wait for a host that it had lost", `
job seed=433666382 hosts=4 late=0 least=1 local=1 seeds=2 restarts=2 pace=113981 latency=99µs lost-after=3s calm=1m40s
+5.119s split a ^a 2.813291s 740.268ms
end1+189µs drain a - 0s 0s
end1+912µs split a ^a 2.813291s 740.268ms
+5.119001s complete - - 0s 0s`},
}

func TestSimulatedSchedules(t *testing.T) {
	for _, c := range simSchedules {
		t.Run(c.name, func(t *testing.T) {
			s, err := parseSchedule(c.text)
			require.NoError(t, err)
			if r, bad := fails(t, s, 2); bad {
				require.FailNow(t, r.violation, strings.Join(r.events, "\n"))
			}
		})
	}
}

// The text of a schedule replays it.
func TestScheduleText(t *testing.T) {
	for seed := range uint64(1000) {
		s := randomSchedule(seed)
		again, err := parseSchedule(s.String())
		require.NoError(t, err)
		require.Equal(t, s, again)
	}
	for _, bad := range []string{"job hosts=x", "job horses=3", "+1s split a", "soon split a b 0s 0s", "+1s split a b 0 x"} {
		_, err := parseSchedule(bad)
		require.Error(t, err, bad)
	}
}
