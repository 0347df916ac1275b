"""What the official client asks about sessions, runs and checkpoints."""

import datetime

import pytest

from tests.tinker import tiny
from tests.tinker.test_tinker_client import WAIT, service, tinker, trainer, types

pytestmark = pytest.mark.clients
__all__ = ['service']  # a fixture


@pytest.fixture(scope='module')
def rest(server):
  return tinker.RestClient(base_url=server.url, api_key=tiny.KEY)


def test_checkpoints_are_copied(service, rest, checkpoint):
  with trainer(service, checkpoint) as client:
    state = client.save_state('first').result(timeout=WAIT).path
    saved = client.save_weights_for_sampler('second').result(timeout=WAIT).path
  copies = [
    rest.copy_weights(path, 'archive', ttl_seconds=7200).result(timeout=WAIT)
    for path in (state, saved)
  ]
  assert len({*copies, state, saved}) == 4
  run = rest.get_training_run_by_tinker_path(copies[0]).result(timeout=WAIT)
  assert run.lora_rank == 4 and run.last_checkpoint.tinker_path == copies[0]
  assert run.last_checkpoint.expires_at > run.last_checkpoint.time
  archived = rest.list_training_runs(project_id='archive').result(timeout=WAIT)
  assert archived.cursor.total_count == 2
  # A copy outlives what was copied, and is what it was.
  for path in (state, saved):
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=WAIT)
  resumed = service.create_training_client_from_state_with_optimizer(copies[0])
  assert resumed.result(timeout=WAIT).get_info().lora_rank == 4
  sampler = service.create_sampling_client(copies[1]).result(timeout=WAIT)
  assert sampler.compute_logprobs(types.ModelInput.from_ints([1, 2])).result(WAIT)
  usage = rest.get_current_checkpoint_storage_usage('archive').result(timeout=WAIT)
  (item,) = usage.data
  assert item.checkpoint_count == 2 and item.size_bytes > 0
  with pytest.raises(tinker.NotFoundError, match='no checkpoint'):
    rest.copy_weights(state, 'archive').result(timeout=WAIT)


def test_a_copy_that_is_asked_for_again_is_the_same(service, checkpoint):
  with trainer(service, checkpoint) as client:
    path = client.save_state('once').result(timeout=WAIT).path
  request = types.CopyWeightsRequest(
    source_path=path, session_id=service.holder.get_session_id(), model_seq_id=77
  )

  async def send():
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    with service.holder.aclient(ClientConnectionPoolType.TRAIN) as client:
      return await client.models.copy_weights(request=request)

  copies = [
    service.holder.run_coroutine_threadsafe(send()).result(timeout=WAIT).tinker_path
    for _ in range(2)
  ]
  assert copies[0] == copies[1] != path


def test_sessions_are_found(rest, server):
  names = 'one nightly', 'two nightly', 'other'
  made = [
    tinker.ServiceClient(
      base_url=server.url,
      api_key=tiny.KEY,
      display_name=name,
      user_metadata={'kind': name[:3]},
    )
    for name in names
  ]
  ids = [client.holder.get_session_id() for client in made]
  made[0].close('interrupted').result(timeout=WAIT)
  rest.assign_session_project(ids[1], 'mine').result(timeout=WAIT)

  def search(**query):
    with pytest.warns(Warning, match='experimental'):
      future = rest.search_sessions(types.SessionSearchRequest(**query))
    return future.result(timeout=WAIT)

  def found(**query):
    page = search(**query)
    return [
      session.session_id for session in page.sessions if session.session_id in ids
    ]

  assert found() == ids[::-1]
  assert found(display_name='NIGHT one') == [ids[0]]
  assert found(session_id=ids[2], display_name='nightly') == ids[::-1]
  assert found(user_metadata={'kind': 'two'}) == [ids[1]]
  assert found(project_ids=['mine']) == [ids[1]]
  assert found(owner=types.UserSearchOwner(owner_urns=['urn:nobody'])) == []
  ended = types.ClientFinishedSessionStatusQuery(reasons=['interrupted'])
  assert found(statuses=[ended]) == [ids[0]]
  assert ids[0] not in found(statuses=[types.ActiveSessionStatusQuery()])
  first = search(display_name='nightly', limit=1)
  (entry,) = first.sessions
  assert entry.session_id == ids[1] and entry.project_id == 'mine'
  assert entry.status.type == 'active' and entry.checkpoints_count == 0
  second = search(display_name='nightly', limit=1, cursor=first.next_cursor)
  assert [x.session_id for x in second.sessions] == [ids[0]]
  assert second.next_cursor is None
  for client in made[1:]:
    client.close('success').result(timeout=WAIT)


def test_what_is_refused_says_why(service, rest, checkpoint):
  with trainer(service, checkpoint) as client:
    path = client.save_state('mine').result(timeout=WAIT).path
  now = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
  refused = {
    'nothing can be published': lambda: rest.publish_checkpoint_from_tinker_path(path),
    'nothing is published': lambda: rest.unpublish_checkpoint_from_tinker_path(path),
    'no audit log': lambda: rest.get_audit_log(),
    'bills nothing': lambda: rest.get_billing_usage(
      now - datetime.timedelta(hours=2), now
    ),
    'must be from 1': lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 10**12),
    'one key': lambda: rest.copy_weights(path, 'x', weights_access_token='t'),
  }
  for reason, call in refused.items():
    with pytest.raises(tinker.BadRequestError, match=reason):
      call().result(timeout=WAIT)
  session_id = service.holder.get_session_id()
  with pytest.raises(RuntimeError, match='records no traces'):
    rest.export_session_trace(session_id).result(timeout=WAIT)
  with pytest.raises(RuntimeError, match='JWT'):
    rest.whoami().result(timeout=WAIT)
  for call in (rest.list_checkpoints, rest.get_training_run, rest.get_session):
    with pytest.raises(tinker.NotFoundError, match='there is no'):
      call('nothing').result(timeout=WAIT)
