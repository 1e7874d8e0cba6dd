// Package check tests the files of deploy.
package check

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	trainer "github.com/kubeflow/trainer/v2/pkg/apis/trainer/v1alpha1"
	"github.com/stretchr/testify/require"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	"sigs.k8s.io/yaml"
)

// decode decodes an object of a manifest, and fails for fields that its type does not have.
func decode[T any](t *testing.T, file string, document int) *T {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "kubernetes", file))
	require.NoError(t, err)
	x := new(T)
	require.NoError(t, yaml.UnmarshalStrict(bytes.Split(text, []byte("\n---\n"))[document], x))
	return x
}

func TestJob(t *testing.T) {
	service, job := decode[core.Service](t, "job.yaml", 0), decode[batch.Job](t, "job.yaml", 1)
	require.Equal(t, []string{"v1", "Service", "batch/v1", "Job"}, []string{service.APIVersion, service.Kind, job.APIVersion, job.Kind})
	require.Equal(t, core.ClusterIPNone, service.Spec.ClusterIP)
	require.True(t, service.Spec.PublishNotReadyAddresses)
	require.Equal(t, map[string]string{batch.JobNameLabel: job.Name}, service.Spec.Selector)
	require.Equal(t, service.Name, job.Spec.Template.Spec.Subdomain)
	checkJob(t, &job.Spec, job.Name+"-0."+service.Name)
}

func TestJobSet(t *testing.T) {
	set := decode[jobset.JobSet](t, "jobset.yaml", 0)
	require.Equal(t, []string{"jobset.x-k8s.io/v1alpha2", "JobSet"}, []string{set.APIVersion, set.Kind})
	require.True(t, *set.Spec.Network.EnableDNSHostnames)
	require.True(t, *set.Spec.Network.PublishNotReadyAddresses)
	require.Len(t, set.Spec.ReplicatedJobs, 1)
	hosts := set.Spec.ReplicatedJobs[0]
	require.EqualValues(t, 1, hosts.Replicas)
	checkJob(t, &hosts.Template.Spec, set.Name+"-"+hosts.Name+"-0-0."+set.Name)
}

// checkJob checks an indexed job whose pod 0 has a name.
func checkJob(t *testing.T, job *batch.JobSpec, first string) {
	t.Helper()
	require.Equal(t, batch.IndexedCompletion, *job.CompletionMode)
	require.Equal(t, *job.Completions, *job.Parallelism)
	require.Zero(t, *job.BackoffLimit)
	require.Equal(t, []int32{64, 77, 126, 127}, job.PodFailurePolicy.Rules[0].OnExitCodes.Values)
	pod := job.Template.Spec
	require.Equal(t, core.RestartPolicyNever, pod.RestartPolicy)
	require.Greater(t, *pod.TerminationGracePeriodSeconds, int64(2*10), "twice the default of --grace")
	require.Len(t, pod.Containers, 1)
	checkRights(t, pod.SecurityContext)
	require.False(t, *pod.AutomountServiceAccountToken)
	require.False(t, *pod.Containers[0].SecurityContext.AllowPrivilegeEscalation)
	require.Equal(t, []core.Capability{"ALL"}, pod.Containers[0].SecurityContext.Capabilities.Drop)
	c := pod.Containers[0]
	require.Equal(t, first, after(t, c.Args, "--seeds"))
	require.EqualValues(t, after(t, c.Args, "--nnodes"), itoa(*job.Completions))
	secret := after(t, c.Args, "--secret-file")
	require.Equal(t, filepath.Dir(secret), mount(t, pod.Volumes, c, func(v core.Volume) bool { return v.Secret != nil }))
	require.Equal(t, "/dev/shm", mount(t, pod.Volumes, c, func(v core.Volume) bool {
		return v.EmptyDir != nil && v.EmptyDir.Medium == core.StorageMediumMemory
	}))
	for _, v := range pod.Volumes {
		if v.Secret != nil {
			require.EqualValues(t, 0o400, *v.Secret.DefaultMode)
		}
	}
}

// checkRights checks that a pod does not run as root, and that its user can read the mounted secret.
func checkRights(t *testing.T, s *core.PodSecurityContext) {
	t.Helper()
	require.True(t, *s.RunAsNonRoot)
	require.NotZero(t, *s.RunAsUser)
	require.Equal(t, *s.RunAsGroup, *s.FSGroup)
	require.Equal(t, core.SeccompProfileTypeRuntimeDefault, s.SeccompProfile.Type)
}

// Only pods of the job reach its ports.
func TestNetworkPolicy(t *testing.T) {
	job, policy := decode[batch.Job](t, "job.yaml", 1), decode[networking.NetworkPolicy](t, "job.yaml", 2)
	pods := map[string]string{batch.JobNameLabel: job.Name}
	require.Equal(t, pods, policy.Spec.PodSelector.MatchLabels)
	require.Equal(t, []networking.PolicyType{networking.PolicyTypeIngress}, policy.Spec.PolicyTypes)
	require.Len(t, policy.Spec.Ingress, 1)
	require.Equal(t, pods, policy.Spec.Ingress[0].From[0].PodSelector.MatchLabels)
}

// The file that the example of a secret makes is not sent to the builder of an image, whose user is not root.
func TestImage(t *testing.T) {
	ignored, err := os.ReadFile("../../.dockerignore")
	require.NoError(t, err)
	for _, name := range []string{"key", ".git", "**/*secret*"} {
		require.Contains(t, strings.Split(string(ignored), "\n"), name)
	}
	image, err := os.ReadFile("../docker/Dockerfile")
	require.NoError(t, err)
	require.Regexp(t, `(?m)^USER [1-9]`, string(image))
	require.Contains(t, string(image), "sha256sum -c")
}

// TestRightsOfTheUnit lets systemd rate the rights of the unit, without starting anything.
func TestRightsOfTheUnit(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("no systemd-analyze")
	}
	out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--threshold=30", "../systemd/chorus.service").CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func TestTrainJob(t *testing.T) {
	job := decode[trainer.TrainJob](t, "trainjob.yaml", 0)
	require.Equal(t, []string{"trainer.kubeflow.org/v1alpha1", "TrainJob"}, []string{job.APIVersion, job.Kind})
	require.Equal(t, []string{"/app/chorus"}, job.Spec.Trainer.Command)
	require.EqualValues(t, 2, *job.Spec.Trainer.NumNodes)
	for _, flag := range []string{"--nnodes", "--seeds", "--node-rank", "--nproc-per-node"} {
		require.NotContains(t, job.Spec.Trainer.Args, flag, "PET_ variables say it")
	}
}

// mount returns where the container mounts the volume.
func mount(t *testing.T, volumes []core.Volume, c core.Container, is func(core.Volume) bool) string {
	t.Helper()
	v := slices.IndexFunc(volumes, is)
	require.GreaterOrEqual(t, v, 0)
	m := slices.IndexFunc(c.VolumeMounts, func(m core.VolumeMount) bool { return m.Name == volumes[v].Name })
	require.GreaterOrEqual(t, m, 0)
	return c.VolumeMounts[m].MountPath
}

// after returns the argument after a flag.
func after(t *testing.T, args []string, flag string) string {
	t.Helper()
	i := slices.Index(args, flag)
	require.True(t, i >= 0 && i+1 < len(args), "%s in %s", flag, strings.Join(args, " "))
	return args[i+1]
}
